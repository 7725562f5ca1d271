"""Neighbouring files: what a site says does not depend on what one record holds, or on whether it
is there where that is hidden.

A record is one line of a CSV file, or one row of another file. One that cannot be read counts in
R_i and contributes zero to every noised query.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from deploy.test_deployed import deployment
from deploy.world import OFFERED, TABLE, World, new_site
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small import CPU, Driven, Trial, federation, loop, setting
from torch import nn
from typer.testing import CliRunner

from dpscaffold.algorithms import Broadcast, Participant
from dpscaffold.cli import app
from dpscaffold.config.gaussian import Gaussian
from dpscaffold.deployment.protocol.agreement import SchemaSettings
from dpscaffold.deployment.protocol.messages import fresh_id, unpack
from dpscaffold.deployment.site.file import SiteFile
from dpscaffold.deployment.site.reading import read_records
from dpscaffold.engine.host import Source, drawn_on_host
from dpscaffold.engine.query import Numbers, query_of
from dpscaffold.engine.records import Records
from dpscaffold.engine.steps import Participation, local_steps
from dpscaffold.randomness.streams import Randomness
from dpscaffold.tasks import Logistic, Mlp, ModuleTask
from dpscaffold.tasks.clipping import prepared

HEADER = b"id,note,sex,ill,age,bmi\n"
CSV = {"source": "csv", "path": "d.csv"}

#: What one record may be changed to, each in one line.
RECORDS = {
    "another": b"7,fine,m,no,44,31.5",
    "empty": b"",
    "an extra comma": b"7,a, comma,f,yes,31,20",
    "a value short": b"7,fine,f,yes,31",
    "an open quote": b'7,"open,f,yes,31,20',
    "an open quote at the end": b'7,fine,f,yes,31,"20',
    "a misplaced quote": b'7,"a"b,f,yes,31,20',
    "latin-1 in a column that is not asked for": b"7,M\xfcnchen,f,yes,31,20",
    "latin-1": b"7,fine,f\xfc,yes,31,20",
    "bytes": b"\x00\xff\xfe\x01",
    "a carriage return": b"7,fine,f,yes,3\r1,20",
    "no number": b"7,fine,f,yes,old,20",
    "a decimal comma": b'7,fine,f,yes,"52,3",20',
    "too large": b"7,fine,f,yes,1e400,20",
    "the largest": b"7,fine,f,yes,3e38,-3e38",
    "infinite": b"7,fine,f,yes,inf,nan",
    "missing": b"7,,,,,",
    "no class": b"7,fine,f,perhaps,31,20",
    "no category": b"7,fine,x,yes,31,20",
    "long": b"7," + b"x" * (2 << 20) + b",f,yes,31,20",
}


def lines(count: int, seed: int = 0) -> list[bytes]:
    stream = np.random.default_rng(seed)
    return [
        f"{k},note {k},{stream.choice(['f', 'm'])},{stream.choice(['no', 'yes'])},"
        f"{stream.integers(20, 90)},{stream.normal(25, 4):.2f}".encode()
        for k in range(count)
    ]


def csv_of(records: list[bytes]) -> bytes:
    return HEADER + b"".join(record + b"\n" for record in records)


# --- reading


def read(folder: Path, raw: bytes, rows: SchemaSettings = TABLE):
    (folder / "d.csv").write_bytes(raw)
    return read_records(CSV, folder, rows)


strange = st.binary(max_size=30).map(lambda raw: raw.replace(b"\n", b""))
cells = st.sampled_from(
    [b"f", b"m", b"no", b"yes", b"31", b"-9", b"", b'"', b'"a"', b"\xfc", b"1e99"]
)
rows = st.lists(cells, min_size=5, max_size=7).map(b",".join)


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(records=st.lists(strange | rows | st.sampled_from([*RECORDS.values()]), max_size=6))
def test_every_line_is_a_record_and_is_read_alone(tmp_path, records):
    """The table of some lines is, record by record, what each line gives by itself."""
    marked = TABLE.changed(na_values={"age": ["-9"]})
    found = read(tmp_path, csv_of(records), marked)
    assert len(found) == len(records)
    for k, record in enumerate(records):
        alone = read(tmp_path, csv_of([record]), marked)
        assert torch.equal(found.features[k], alone.features[0])
        assert found.labels[k] == alone.labels[0] and found.used[k] == alone.used[0]
    assert torch.isfinite(found.features).all() and not found.features[~found.used].any()


def test_the_end_of_the_last_line_does_not_matter(tmp_path):
    whole = read(tmp_path, csv_of(lines(5)))
    for raw in (csv_of(lines(5))[:-1], csv_of(lines(5)).replace(b"\n", b"\r\n")):
        found = read(tmp_path, raw)
        assert torch.equal(found.features, whole.features) and found.used.all()


def test_quoted_values_are_read_within_their_line(tmp_path):
    records = [b'1,"a, b",f,yes,"31",20', b'2,"say ""so""",m,no,40,30']
    found = read(tmp_path, b"\xef\xbb\xbf" + csv_of(records))
    assert found.features.tolist() == [[31, 20, 1, 0], [40, 30, 0, 1]] and found.used.all()


def test_rows_of_parquet_files_are_read_alone(tmp_path):
    """Bytes that are no text, typed columns, and nulls; of each row what it is alone."""
    table = {
        "sex": pa.array([b"f", b"\xff", b"m", None], pa.binary()),
        "ill": pa.array([b"yes", b"no", b"\xff", b"no"], pa.binary()).cast(pa.binary()),
        "age": pa.array([31.0, 1e300, float("nan"), None]),
        "bmi": pa.array(["20", "x", " 30 ", "-9"]),
    }
    rows = TABLE.changed(na_values={"bmi": ["-9"]})

    def found(select):
        part = pa.table(table).take(select)
        pyarrow.parquet.write_table(part, tmp_path / "d.parquet")
        return read_records({"source": "parquet", "path": "d.parquet"}, tmp_path, rows)

    whole = found([0, 1, 2, 3])
    assert whole.used.tolist() == [True, False, False, True]
    assert whole.features[[0, 3]].tolist() == [[31, 20, 1, 0], [-1, -1, 0, 0]]
    for k in range(4):
        alone = found([k])
        assert torch.equal(alone.features[0], whole.features[k])
        assert alone.used[0] == whole.used[k] and alone.labels[0] == whole.labels[k]


@pytest.mark.parametrize("kind", [np.int64, np.float64])
def test_rows_of_arrays_are_read_alone(tmp_path, kind):
    features = np.array([[1, 2], [np.nan, 0], [np.inf, 0], [1e300, 0], [3, 4], [5, 6]])
    labels = np.array([1, 0, 0, 0, 2, -1]).astype(kind)
    np.savez(tmp_path / "d.npz", features=features, labels=labels)
    rows = SchemaSettings(features=2, classes=2)
    found = read_records({"source": "npz", "path": "d.npz"}, tmp_path, rows)
    assert found.used.tolist() == [True] + [False] * 5
    assert found.features[0].tolist() == [1, 2] and found.labels.tolist() == [1] + [0] * 5


# --- a record that contributes nothing


class Deaf:
    """A task that does not hear a record whose first feature is the mark."""

    def losses(self, params, features, labels):
        heard = features[:, 0] != MARK
        return super().losses(params, features, labels) * heard


class DeafLogistic(Deaf, Logistic):
    pass


class DeafMlp(Deaf, Mlp):
    pass


MARK = 77.0
FIXED = Gaussian(clip=0.7, noise=0.8)


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
@pytest.mark.parametrize("task", ["logistic", "mlp"])
def test_a_bad_record_at_a_site_adds_exactly_zero(tmp_path, task, sampling):
    """The bias included, while it counts in R_i and may be drawn: the loop engine is the oracle."""
    privacy = Gaussian(clip=0.7, noise=0.8, sampling=sampling)
    data = federation((9, 12, 7))
    features = data.train.features.clone()
    features[data.train.offsets[1] + 3, 0] = MARK
    data = replace(data, train=replace(data.train, features=features))
    world = World(tmp_path, "scaffold-balanced", task, privacy, data, user_ratio=1.0)
    raw = dict(np.load(tmp_path / "north" / "data.npz"))
    raw["labels"][3] = 99  # of no class
    np.savez(tmp_path / "north" / "data.npz", **raw)
    world.enrol()
    assert world.enrolled.sizes == (9, 12, 7)
    world.drive()
    kinds = {"logistic": DeafLogistic(4, 3), "mlp": DeafMlp(4, 3, hidden=6)}
    run = Trial.of(data, kinds[task], world.setting.algorithm, world.setting.plan, privacy)
    meant = Driven(loop(run)).drive().reached
    torch.testing.assert_close(world.state.params, meant.params, rtol=1e-4, atol=1e-5)
    heard = Driven(loop(replace(run, task=world.setting.task))).drive().reached
    assert not torch.allclose(world.state.params, heard.params, atol=1e-4)


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_weights_of_records_hold(sampling):
    """A network without biases has no gradient at zero: there a weight of 0 is a row of zeros."""
    task = ModuleTask(
        nn.Sequential(nn.Linear(4, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False))
    )
    privacy = Gaussian(clip=0.7, noise=0.8, sampling=sampling)
    run = setting("scaffold", task, privacy, federation((12,)), user_ratio=1.0)
    features, labels = run.federation.train.of(0)
    weight = torch.ones(12)
    weight[[2, 5]] = 0
    x = task.initial(0)[None]
    slots = {"control": torch.zeros_like(x)}
    numbers = Numbers.of_one(run.plan, 2, 0, 4, 1.0, privacy, CPU)
    at = Participant(Broadcast(2, x, slots), slots, query_of(run).known(numbers))
    sent = []
    for table, known in ((features, weight), (features * weight[:, None], None)):
        records = Records(*prepared(task, table, CPU), labels, weight=known)
        draws = drawn_on_host(2, [Source(Randomness(0), 0, 12, 4)], 3, sampling, x.shape[1], CPU)
        batches = records.batches(torch.zeros(1, 1, dtype=torch.int64), draws)
        part = Participation(task, run.algorithm, query_of(run), at, numbers)
        sent.append(local_steps(part, batches).params)
    torch.testing.assert_close(sent[0], sent[1], rtol=1e-5, atol=1e-6)
    assert not torch.equal(sent[0], x)


# --- messages


class Tables(World):
    """A federation of sites with CSV files."""

    def __init__(self, folder: Path, files: list[bytes], declared=None, **more) -> None:
        self.files, self.declared = files, declared
        data = federation((8,) * len(files), classes=2)
        if (privacy := more.get("privacy")) and declared and privacy.sampling == "poisson":
            data = data.declaring(declared)
        super().__init__(folder, data=data, user_ratio=1.0, rounds=2, **more)
        self.rows = TABLE
        self.fresh_server()

    def write_data(self, name: str, user: int, rows: slice = slice(None)) -> None:
        (self.folder / name / "d.csv").write_bytes(self.files[user])

    def file(self, name: str) -> SiteFile:
        return super().file(name).model_copy(update={"data": CSV, "records": self.declared})


#: What is drawn afresh in every run.
DRAWN = {"run", "nonce", "commitment", "nonce_shown", "upload", "uploads"}


def heard(folder: Path, raw: bytes, declared: int | None = None, **more):
    """All that a server hears of a site: every answer, without what is drawn and noised."""
    world = Tables(folder / fresh_id(), [raw], declared, **more)
    said = []
    try:
        world.enrol()
        world.drive()
        world.engine.settle(world.state.output)
    except Exception as end:  # a refusal ends the run
        said.append(type(end).__name__)
    for _, answer in world.exchange.answered:
        message = unpack(answer)
        plain = {k: v for k, v in message.header.items() if k not in DRAWN}
        if "ledger" in plain:  # its head is a keyed hash, its number of lines is not
            plain["ledger"] = plain["ledger"]["lines"]
        said.append(plain)
        said.append({name: vector.shape for name, vector in message.vectors.items()})
    world.close("east")
    return said


SECRET = Gaussian(clip=0.7, noise=20.0, secret=True)
RELATIONS = {
    "replace-one": (SECRET, None),
    "zero-out": (Gaussian(clip=0.7, noise=20.0, secret=True, sampling="poisson"), None),
    "add-remove": (
        Gaussian(clip=0.7, noise=20.0, secret=True, sampling="poisson"),
        9,
    ),
    "user": (Gaussian(clip=0.7, noise=20.0, secret=True, unit="user"), None),
    "user, poisson": (
        Gaussian(clip=0.7, noise=20.0, secret=True, unit="user", sampling="poisson"),
        None,
    ),
    "no privacy": (None, None),
}
POLICIES = {
    "loose": {},
    "tight": {"epsilon": 0.35, "delta": 1e-6, "max_runs": 1},
    "none": {"epsilon": 1e-6},
    "protected": {"units": ("record", "user")},
}


@pytest.mark.parametrize("relation", RELATIONS)
def test_no_record_changes_what_a_server_hears(tmp_path, relation):
    """Whatever stands in one line of the file, at its start, within it and at its end."""
    privacy, declared = RELATIONS[relation]
    before = lines(9)
    said = heard(tmp_path, csv_of(before), declared, privacy=privacy)
    assert len(said) > 8
    for k, (name, record) in enumerate(RECORDS.items()):
        place = (0, 4, 8)[k % 3]
        after = [*before[:place], record, *before[place + 1 :]]
        assert heard(tmp_path, csv_of(after), declared, privacy=privacy) == said, name


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("relation", RELATIONS)
def test_nor_under_any_policy(tmp_path, relation, policy):
    privacy, declared = RELATIONS[relation]
    given = {"privacy": privacy, "policy": POLICIES[policy]}
    before = lines(9)
    said = heard(tmp_path, csv_of(before), declared, **given)
    for name in ("an open quote", "latin-1"):
        after = [RECORDS[name], *before[1:]]
        assert heard(tmp_path, csv_of(after), declared, **given) == said, name


@pytest.mark.parametrize("held", [1, 9])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_record_that_is_there_or_not_changes_nothing_under_add_remove(tmp_path, policy, held):
    """Below, at and above the declared size, and with no record at all."""
    privacy, declared = RELATIONS["add-remove"]
    given = {"privacy": privacy, "policy": POLICIES[policy]}
    said = heard(tmp_path, csv_of(lines(held)), declared, **given)
    for after in (lines(held)[1:], [*lines(held), RECORDS["another"]], [b"", *lines(held)]):
        assert heard(tmp_path, csv_of(after), declared, **given) == said


@pytest.mark.parametrize("relation", ["user", "user, poisson"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_whole_dataset_changes_nothing_with_a_user_as_unit(tmp_path, relation, policy):
    privacy, _ = RELATIONS[relation]
    given = {"privacy": privacy, "policy": POLICIES[policy]}
    said = heard(tmp_path, csv_of(lines(40)), **given)
    for other in ([], lines(1), [RECORDS["bytes"]] * 20):
        assert heard(tmp_path, csv_of(other), **given) == said
    assert heard(tmp_path, csv_of(lines(7)), declared=8, **given) == said


def test_what_decides_is_public(tmp_path):
    """The columns, and R_i where it is public: these do change the answers."""
    said = heard(tmp_path, csv_of(lines(9)), privacy=SECRET)
    assert heard(tmp_path, csv_of(lines(10)), privacy=SECRET) != said
    assert "data-unfit" in str(heard(tmp_path, csv_of(lines(1)), privacy=SECRET))
    assert "data-unfit" in str(heard(tmp_path, HEADER.replace(b"age", b"AGE"), privacy=SECRET))


def test_records_that_change_in_mid_run_are_not_told(tmp_path):
    """Only their public number would be: see test_faults for one record fewer."""
    world = Tables(tmp_path, [csv_of(lines(9))] * 2, privacy=SECRET)
    world.enrol()
    world.round()
    world.files[0] = csv_of([*lines(8), RECORDS["bytes"]])
    world.write_data("east", 0)
    world.restart("east")
    assert world.round().arrived == (0, 1)


# --- sizes with a user as unit


def plain_values(value, at=()):
    """Every value of a JSON-like structure with its path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from plain_values(item, (*at, key))
    elif isinstance(value, list | tuple):
        yield (*at, "length"), len(value)
        for k, item in enumerate(value):
            yield from plain_values(item, (*at, k))
    elif isinstance(value, torch.Tensor):
        yield at, tuple(value.shape)
    else:
        yield at, value


def known_to(folder: Path, sizes, algorithm):
    """All that the server keeps and that sites are sent, without noise, times and draws."""
    user = Gaussian(clip=0.7, noise=20.0, secret=True, unit="user")
    world = World(folder / "sites", algorithm, privacy=user, data=federation(sizes), user_ratio=1.0)
    deployment(world, folder / "run").run(world.names, resume=False)
    found = {}
    for path in sorted((folder / "run").rglob("*")):
        name = str(path.relative_to(folder / "run"))
        if path.suffix == ".pt":
            found |= dict(plain_values(torch.load(path, weights_only=False), (name,)))
        elif path.suffix == ".jsonl":
            for k, line in enumerate(path.read_text().splitlines()):
                found |= dict(plain_values(json.loads(line), (name, k)))
        elif path.suffix == ".json":
            found |= dict(plain_values(json.loads(path.read_text()), (name,)))
        elif path.is_file() and path.suffix in (".toml", ".log", ".txt", ".md"):
            found[name,] = re.sub(r"\b[0-9a-f]{16,}\b", "", path.read_text())
    for k, (_, raw) in enumerate(world.exchange.sent):
        message = unpack(raw)
        found |= dict(plain_values(dict(message.header), ("sent", k)))
        found |= {("sent", k, n): v.shape for n, v in message.vectors.items()}
    noised = {key for key, value in found.items() if isinstance(value, float)}
    drawn = {key for key, value in found.items() if isinstance(value, str) and is_drawn(value)}
    return {key: value for key, value in found.items() if key not in noised | drawn}


def is_drawn(text: str) -> bool:
    """A random number, a hash of one, or a time."""
    return len(text) >= 16 and (set(text) <= set("0123456789abcdef") or text[:2] == "20")


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold-balanced"])
def test_nothing_at_the_server_tells_a_size_with_a_user_as_unit(tmp_path, algorithm):
    one, other = (
        known_to(tmp_path / name, sizes, algorithm)
        for name, sizes in (("a", (9, 12, 7)), ("b", (31, 5, 64)))
    )
    differing = {key for key in {*one, *other} if one.get(key) != other.get(key)}
    assert not differing, [(key, one.get(key), other.get(key)) for key in differing][:5]
    assert len(one) > 100


# --- the site's own check


PLAN = f"""
[schema]
features = ["age", "sex", "bmi"]
categories = {{ sex = ["f", "m"] }}
label = "ill"
classes = ["no", "yes"]
missing = -1.0
{OFFERED}"""


@pytest.fixture
def site(tmp_path):
    (tmp_path / "plan.toml").write_text(PLAN)
    return new_site(tmp_path, 'source = "csv"\npath = "d.csv"', {"epsilon": "9.0"})


def checked(site: Path, *more: str):
    result = CliRunner().invoke(app, ["site", "check", str(site), "--offline", "--json", *more])
    return result.exit_code, {e["found"]: e["ok"] for e in json.loads(result.output)}


def test_the_check_names_lines_and_fails(site):
    offer = ("--offer", str(site.parent.parent / "plan.toml"))
    (site.parent / "d.csv").write_bytes(csv_of(lines(40)))
    for more in ((), offer):
        code, found = checked(site, *more)
        assert code == 0 and all(found.values()), found
    broken = lines(40)
    names = "an extra comma", "an open quote", "latin-1", "empty", "no number", "no class"
    for place, name in zip((3, 7, 11, 20, 30, 31), names, strict=True):
        broken[place] = RECORDS[name]
    (site.parent / "d.csv").write_bytes(csv_of(broken))
    for more, places in (((), (5, 9, 13, 22)), (offer, (5, 9, 13, 22, 32, 33))):
        code, found = checked(site, *more)
        said = " ".join(sentence for sentence, fine in found.items() if not fine)
        assert code == 1
        assert sorted(map(int, re.findall(r"line (\d+)", said))) == list(places)
    accepted = [fine for sentence, fine in found.items() if "would be accepted" in sentence]
    assert accepted == [True]  # what the server would hear is the same


def test_the_check_says_that_there_are_more_records_than_declared(site):
    (site.parent / "d.csv").write_bytes(csv_of(lines(40)))
    text = site.read_text().replace("\n[data]", "records = 39\n\n[data]", 1)
    site.write_text(text)
    plan = site.parent.parent / "plan.toml"
    plan.write_text(PLAN + 'sampling = "poisson"\n')
    code, found = checked(site, "--offer", str(plan))
    wrong = [sentence for sentence, fine in found.items() if not fine]
    assert code == 1 and len(wrong) == 1
    assert "40 records" in wrong[0] and "records = 39" in wrong[0]


# --- a declared size


@pytest.mark.parametrize("relation", ["replace-one", "zero-out", "no privacy"])
@pytest.mark.parametrize("policy", ["loose", "tight"])
def test_no_offer_overrules_a_declared_size(tmp_path, relation, policy):
    """Whatever neighbours a server proposes: with records = 12 it hears of 12, and a record that is
    there or not changes nothing."""
    if relation == "no privacy" and policy == "tight":
        policy = "loose"
    given = {"privacy": RELATIONS[relation][0], "policy": POLICIES[policy]}
    said = heard(tmp_path, csv_of(lines(9)), 12, **given)
    assert [header["records"] for header in said[::2] if "records" in header] == [12]
    for after in (lines(9)[1:], [*lines(9), RECORDS["another"]], [], lines(13)):
        assert heard(tmp_path, csv_of(after), 12, **given) == said


def test_an_absent_record_is_an_empty_one_if_the_size_is_declared(tmp_path):
    """With fixed batches the table is filled with empty records, which is the
    neighbour that the offer's ε is for."""
    tables = []
    for records in (lines(9), [*lines(9), b"", b"", b""]):
        world = Tables(tmp_path / fresh_id(), [csv_of(records)], 12, privacy=SECRET)
        world.enrol()
        tables.append(world.sites["east"]._works[world.enrolled.run])
        world.close("east")
    one, other = tables
    assert one.records == other.records == 12 and one.batch == other.batch
    assert torch.equal(one.held.features, other.held.features)
    assert torch.equal(one.held.used, other.held.used)
