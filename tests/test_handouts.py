"""What may leave, made twice: from neighbouring datasets, with the same noise.

Everything that docs/howto/release.md lets out is compared byte by byte. Only values that carry
noise may differ, and only by as much as one record moves them before noise is added.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deploy.test_deployed import deployment
from deploy.world import World
from safetensors.torch import load_file
from small import federation
from stated import described, summary_of
from typer.testing import CliRunner

import dpscaffold.training.train as training
from dpscaffold import Federation, Gaussian, Logistic, Plan, fedavg, train
from dpscaffold.cli import app
from dpscaffold.config import load
from dpscaffold.data.loading import load_federation
from dpscaffold.data.prepared import Shift
from dpscaffold.deployment.protocol.messages import SignedMessage
from dpscaffold.deployment.site.answer import Site
from dpscaffold.randomness.csprng import CipherStream
from dpscaffold.randomness.streams import OneRound, Randomness
from dpscaffold.report import outcome, story
from dpscaffold.report.blocks import Section, Text
from dpscaffold.runs.journal import START

#: A release as the recipe describes it. A round is one step with all records: what one of them
#: moves is known.
CONFIG = """
[data]
source = "csv"
path = "visits.csv"
label = "ill"
user = "site"
classes = ["no", "yes"]
preprocess = [
  { step = "standardise", fit = "public", mean = [55.0, 10.0], deviation = [20.0, 6.0] },
  "clip-norm:3",
]
[algorithm]
name = "fedavg"
[plan]
rounds = 1
local_steps = 1
user_ratio = 1.0
data_ratio = 1.0
evaluate_every = 1
[privacy]
noise = 20.0
"""
SITES = "abcdef"
Rows = list[tuple[str, int, int, str]]


def visits() -> Rows:
    """Rows of a table: site, age, days in hospital, ill or not."""
    draw = random.Random(0)
    rows = []
    for site in SITES:
        for _ in range(25):
            age, stay = draw.randint(20, 90), draw.randint(1, 20)
            rows.append((site, age, stay, "yes" if age + stay > 65 else "no"))
    return rows


def replaced(rows: Rows, place: int) -> Rows:
    """The same rows but for one, which is as far from what it was as it can be."""
    site, age, _, ill = rows[place]
    far = (site, 160 - age, 200, "no" if ill == "yes" else "yes")
    return [*rows[:place], far, *rows[place + 1 :]]


class Tape:
    """The operating system's randomness, the same from the beginning of every tape."""

    def __init__(self) -> None:
        self.place = 0

    def read(self, size: int) -> bytes:
        self.place += 1
        return hashlib.shake_256(str(self.place).encode()).digest(size)


@contextmanager
def same_randomness(place: Path) -> Iterator[pytest.MonkeyPatch]:
    """Work in a folder while every key and seed is known: those of noise and batches by what they
    are for, others by their order."""
    tape = Tape()

    def keyed(self: Randomness, *address: int) -> CipherStream:
        return CipherStream(hashlib.sha256(repr(address).encode()).digest())

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr("os.urandom", tape.read)
        patch.setattr("random._urandom", tape.read)
        patch.setattr(Randomness, "_private", keyed)
        patch.setattr(OneRound, "_private", keyed)
        yield patch


def command(*arguments: str | Path) -> None:
    done = CliRunner().invoke(app, [*map(str, arguments)])
    assert done.exit_code == 0, done.output


class HandOut:
    """A run, and everything of it that may leave, in one folder."""

    def __init__(self, place: Path) -> None:
        self.place, self.run, self.left = place, place / "run", place / "left"
        self.left.mkdir(parents=True)

    def table(self, rows: Rows, config: str = CONFIG) -> HandOut:
        """Its data, for the command line."""
        lines = [",".join(map(str, row)) for row in [("site", "age", "stay", "ill"), *rows]]
        (self.place / "visits.csv").write_text("\n".join(lines) + "\n")
        (self.place / "visits.toml").write_text(config)
        return self

    def collect(self, to: str = "safetensors") -> HandOut:
        """What the recipe hands out of the run: page, card, statement, model and an export."""
        self.show()
        out = self.left / f"exported.{to}"
        command("export", self.run, "--to", to, "--out", out, "--only-protected")
        shutil.copytree(self.run / "model", self.left / "model")
        for name in ("privacy.json", "privacy.md"):
            shutil.copy(self.run / "model" / name, self.left / name)
        return self

    def show(self) -> None:
        """Write the page and the card."""
        command("report", self.run, "--out", self.left / "page.html")

    def json(self, name: str) -> dict[str, Any]:
        return dict(json.loads((self.run / name).read_text()))

    @property
    def head(self) -> str:
        """The head of the journal, which statements name."""
        return str(self.json("model/privacy.json")["journal"]["head"])

    def head_with(self, identity: str) -> str:
        """The head that the journal would have with another identity of the data."""
        head = START
        for line in (self.run / "ledger.jsonl").read_text().splitlines():
            body = json.loads(line)
            del body["chain"]
            if "opens" in body:
                body["opens"]["data"] = identity
            text = json.dumps(body, sort_keys=True)
            head = hashlib.sha256(f"{head}\n{text}".encode()).hexdigest()
        return head

    @property
    def params(self) -> torch.Tensor:
        return load_file(self.left / "model" / "model.safetensors")["params"]

    @property
    def step(self) -> float:
        """η·C: by so much a clipped gradient of its own could move a user."""
        tables = tomllib.loads((self.run / "config.toml").read_text())
        return float(tables["plan"]["learning_rate"]) * float(tables["privacy"]["clip"])


def plain(path: Path, head: str) -> object:
    """A file without what carries noise and without digests of that. The head of the journal
    stands on a keyed identity of the records, and is looked at by itself."""
    if path.name == "model.safetensors":
        return {k: v.numpy().tobytes() for k, v in load_file(path).items() if k != "params"}
    if path.name == "model.json":
        index = json.loads(path.read_text())
        return {k: sorted(v) if k == "files" else v for k, v in index.items() if k != "digest"}
    if path.suffix == ".torch":
        with zipfile.ZipFile(path) as parts:
            names = [n for n in parts.namelist() if not n.endswith("serialization_id")]
            return {n: parts.read(n) for n in names if "weights" not in n or n.endswith(".json")}
    if path.suffix == ".onnx":
        return without_weights(path)
    return path.read_bytes().replace(head.encode(), b"the head")


def without_weights(path: Path) -> bytes:
    """An ONNX file without the weights of its layers."""
    import onnx

    model = onnx.load(path)
    for value in model.graph.initializer:
        if "weight" in value.name or "bias" in value.name:
            value.ClearField("raw_data")
    return bytes(model.SerializeToString(deterministic=True))


def differences(one: HandOut, other: HandOut) -> list[str]:
    """The files that differ in more than noised values and the journal's head."""
    names = [
        sorted(str(p.relative_to(made.left)) for p in made.left.rglob("*") if p.is_file())
        for made in (one, other)
    ]
    assert names[0] == names[1] and len(names[0]) >= 8
    return [
        name
        for name in names[0]
        if plain(one.left / name, one.head) != plain(other.left / name, other.head)
    ]


def moved(one: HandOut, other: HandOut) -> float:
    """By how much the models differ."""
    return float((one.params.double() - other.params.double()).norm())


def released(place: Path, rows: Rows, config: str = CONFIG, to: str = "safetensors") -> HandOut:
    """The release of a table on the command line."""
    made = HandOut(place).table(rows, config)
    with same_randomness(place):
        command("train", "visits.toml", "--set", "privacy.release=true", "--out", "run", "--quiet")
    return made.collect(to)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[HandOut, HandOut]:
    """The releases of two tables that differ in one record, which is trained on."""
    place, rows = tmp_path_factory.mktemp("pair"), visits()
    one, other = released(place / "one", rows), released(place / "other", replaced(rows, 4))
    assert 4 not in held_out(one.place)
    return one, other


def federation_of(place: Path) -> Federation:
    """The data of a hand-out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        return load_federation(load(place / "visits.toml").data)


def held_out(place: Path) -> list[int]:
    """The places of site a's rows that are held out for testing."""
    test = federation_of(place).test.of(0)[0]
    shown = [[(age - 55) / 20, (stay - 10) / 6] for _, age, stay, _ in visits()[:25]]
    apart = (torch.tensor(shown)[:, None] - test[None]).norm(dim=2).min(dim=1).values
    return torch.nonzero(apart < 1e-5).flatten().tolist()


#: What one record can move: 2C of the sum of 20 (of 25, which are trained on) of one of the sites.
SHARE = 2 / 20 / len(SITES)


def test_one_record_moves_noised_values_alone(pair: tuple[HandOut, HandOut]) -> None:
    one, other = pair
    assert differences(one, other) == []
    assert 0.5 < moved(one, other) / (one.step * SHARE) <= 1.001


def test_the_head_of_the_journal_tells_the_records_by_their_keyed_identity_alone(
    pair: tuple[HandOut, HandOut],
) -> None:
    """Which has the same key in both: a real run draws its own."""
    one, other = pair
    identities = [described(made.run)["data"] for made in pair]
    assert one.head == one.head_with(identities[0]) != one.head_with(identities[1]) == other.head
    assert one.json("secret.json")["data_key"] == other.json("secret.json")["data_key"]


def test_a_record_that_is_held_out_moves_nothing(pair: tuple[HandOut, HandOut], tmp_path) -> None:
    rows, one = visits(), pair[0]
    other = released(tmp_path / "other", replaced(rows, held_out(one.place)[0]))
    assert described(one.run)["data"] != described(other.run)["data"]
    assert differences(one, other) == [] and moved(one, other) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("to", ["safetensors", "torch", "onnx"])
def test_several_rounds_and_exported_programs(tmp_path: Path, to: str) -> None:
    if to == "onnx":
        pytest.importorskip("onnxscript", reason="needs the extra [onnx]")
    rows, config = visits(), CONFIG.replace("rounds = 1", "rounds = 3")
    one = released(tmp_path / "one", rows, config, to)
    other = released(tmp_path / "other", replaced(rows, 4), config, to)
    assert differences(one, other) == []
    # later rounds start from models that differ already
    assert 0.5 < moved(one, other) / (one.step * SHARE) <= 6.0
    if to == "torch":
        for made in (one, other):
            program = torch.export.load(made.left / "exported.torch")
            held = [*program.state_dict.values(), *program.constants.values()]
            numbers = {v for tensor in held for v in tensor.flatten().tolist()}
            assert set(made.params.tolist()) <= numbers


def in_python(place: Path, data: Federation, **privacy: Any) -> HandOut:
    """A release of arrays, whose users brought their test rows themselves."""
    made = HandOut(place)
    plan = Plan(rounds=1, local_steps=1, user_ratio=1.0, data_ratio=1.0, evaluate_every=1)
    mechanism = Gaussian(noise=20.0, release=True, **privacy)
    with same_randomness(place):
        train(data, Logistic(4, 3), fedavg(), plan, mechanism, out="run")
    return made.collect()


def with_user(data: Federation, user: int, rows: tuple[Any, Any]) -> Federation:
    """The same users but for the records that one of them trains on."""
    parts = [data.train.of(i) for i in range(data.users)]
    parts[user] = rows
    test = [data.test.of(i) for i in range(data.users)]
    return Federation.from_arrays(parts, test=test, target=data.target)


@pytest.mark.parametrize("user", [0, pytest.param(5, marks=pytest.mark.slow)])
def test_one_record_more_moves_noised_values_alone(tmp_path: Path, user: int) -> None:
    """Add-remove neighbours: nothing tells how many records there are."""
    data = federation((9, 9, 9, 9, 9, 9))
    x, y = data.train.of(user)
    more = with_user(data, user, (torch.cat([x, 5 * x[:1]]), torch.cat([y, y[:1]])))
    kind = {"sampling": "poisson"}
    one, other = (
        in_python(tmp_path / name, table.declaring(12), **kind)
        for name, table in (("one", with_user(data, user, (x, y))), ("other", more))
    )
    assert differences(one, other) == []
    assert moved(one, other) <= 1.001 * one.step / 12 / 6


@pytest.mark.parametrize(
    "records", [10, *[pytest.param(n, marks=pytest.mark.slow) for n in (4, 9)]]
)
def test_another_user_moves_noised_values_alone(tmp_path: Path, records: int) -> None:
    """Whole users are hidden: neither their records nor how many they are is revealed."""
    data = federation((9, 9, 9, 9, 9, 9))
    x, y = federation((records,), seed=1).train.of(0)
    tables = {"one": data.train.of(2), "other": (5 * x, y)}
    one, other = (
        in_python(tmp_path / name, with_user(data, 2, rows), unit="user")
        for name, rows in tables.items()
    )
    assert differences(one, other) == []
    assert 0 < moved(one, other) <= 1.001 * 2 * one.step / 6


def received_at_the_end(site: Site) -> list[SignedMessage]:
    """Fills with the message that tells a site that the run is over."""
    found: list[SignedMessage] = []
    answer = site.answer

    def listening(message: SignedMessage) -> SignedMessage:
        if message.header.get("over") is True:
            found.append(message)
        return answer(message)

    site.answer = listening  # type: ignore[method-assign]
    return found


def deployed(
    place: Path, data: Federation, algorithm: str
) -> tuple[HandOut, list[Any], dict[str, Any]]:
    """A run of a server and sites: its hand-out, what the sites are given at the end, and the
    metrics on public rows."""
    made = HandOut(place)
    plan = {"rounds": 2, "user_ratio": 1.0, "data_ratio": 1.0, "evaluate_every": 2}
    secret = Gaussian(clip=0.7, noise=20.0, secret=True)
    with same_randomness(place):
        world = World(place / "sites", algorithm, "logistic", secret, data, **plan)
        ends = [received_at_the_end(site) for site in world.sites.values()]
        served = deployment(world, made.run).run(world.names, resume=False)
    for name in world.names:
        world.close(name)
    return made.collect(), [end for (end,) in ends], served.history[-1]


@pytest.mark.parametrize(
    "algorithm", ["scaffold-balanced", pytest.param("fedavg", marks=pytest.mark.slow)]
)
def test_a_deployed_run_hands_out_noised_values_alone(tmp_path: Path, algorithm: str) -> None:
    """The server's model, card and page, and what every site is given at the end. Metrics are
    computed on public rows, so they are functions of the model."""
    data = federation((9, 12, 7))
    x, y = data.train.of(1)
    far = (torch.cat([-5 * x[:1], x[1:]]), torch.cat([2 - y[:1], y[1:]]))
    tables = {"one": with_user(data, 1, (x, y)), "other": with_user(data, 1, far)}
    (one, given, scores), (other, same, others) = (
        deployed(tmp_path / name, table, algorithm) for name, table in tables.items()
    )
    for made, found in ((one, scores), (other, others)):
        for path in (made.left / "page.md", made.left / "page.html"):
            text = re.sub("<img [^>]*>", "", path.read_text())
            for name in [name for name in found if name.startswith("test_")]:
                text = text.replace(f"{found[name]:.4f}", name).replace(f"{found[name]:.4g}", name)
            path.write_text(text)
    assert differences(one, other) == [] and one.head == other.head
    assert 0 < moved(one, other) < 0.02 * float(one.params.norm())  # which is mostly noise
    for mine, theirs in zip(given, same, strict=True):
        for message in (mine, theirs):  # hashes under a secret key of the site
            assert len(message.header.pop("heads")[0]["head"]) == 64
        assert mine.header == theirs.header and len(mine.vectors) == 1
        assert mine.vectors["model.params"].tolist() == one.params.tolist()
        assert theirs.vectors["model.params"].tolist() == other.params.tolist()


def test_a_private_winner_hands_out_noised_values_alone(tmp_path: Path) -> None:
    """The folder winner/ of a private tuning: its score carries noise, too."""
    tune = "[tune]\nscore_noise = 40.0\n[tune.grid]\n"
    config = CONFIG + tune + '"plan.learning_rate" = [0.25, 0.5]\n'
    rows, found = visits(), []
    for name, table in (("one", rows), ("other", replaced(rows, 4))):
        place = HandOut(tmp_path / name).table(table, config).place
        with same_randomness(place):
            command("tune", "visits.toml", "--out", "tuned", "--quiet")
        folder = place / "tuned" / "winner"
        winner = json.loads((folder / "winner.json").read_text())
        score = f"{winner.pop('score'):.4f}".encode()
        best = (folder / "best.toml").read_bytes()
        assert score in best
        files = {p.name: plain(p, " ") for p in (folder / "model").iterdir()}
        found.append([winner, best.replace(score, b"the score"), files])
    assert found[0] == found[1] and len(found[0][2]) == 4


def an_identity_on_the_page(patch: pytest.MonkeyPatch) -> None:
    """The page says what config.toml says of the data."""
    print_more(patch, lambda folder: described(folder)["data"])


def a_digest_on_the_page(patch: pytest.MonkeyPatch) -> None:
    """The same without a key, as it once was."""
    print_more(patch, lambda folder: federation_of(folder.parent).digest().value)


def print_more(patch: pytest.MonkeyPatch, of: Callable[[Path], str]) -> None:
    real = story._again

    def leaky(told: outcome.StoredRun) -> Section:
        part = real(told)
        return Section(part.title, (*part.blocks, Text(of(told.run.folder))))

    patch.setattr(story, "_again", leaky)


def metrics_on_the_page(patch: pytest.MonkeyPatch) -> None:
    """As they once were."""
    patch.setattr(outcome.StoredRun, "shows", lambda told, name: True)


def a_warning_on_the_page(patch: pytest.MonkeyPatch) -> None:
    """A sentence of the summary that compares losses."""
    real = outcome._warnings

    def leaky(told: outcome.StoredRun) -> list[Any]:
        loss = summary_of(told.run.folder)["late_train_loss"]
        return [*real(told), Text(f"the training loss is {loss}")]

    patch.setattr(outcome, "_warnings", leaky)


ON_PAGES = [
    an_identity_on_the_page,
    a_digest_on_the_page,
    metrics_on_the_page,
    a_warning_on_the_page,
]


@pytest.mark.parametrize("leak", ON_PAGES, ids=lambda leak: leak.__name__)
def test_a_leak_on_a_page_is_seen(pair: tuple[HandOut, HandOut], leak: Any) -> None:
    try:
        with pytest.MonkeyPatch.context() as patch:
            leak(patch)
            for made in pair:
                made.show()
        assert differences(*pair) == ["page.html", "page.md"]
    finally:
        for made in pair:
            made.show()
    assert differences(*pair) == []


def a_loss_in_the_statement(patch: pytest.MonkeyPatch) -> None:
    """A number of private records in the statement that goes along with the model."""
    real = training._result

    def leaky(asked: Any, training: Any, *given: Any) -> Any:
        found = training.history[-1]["train_loss"]
        stated = replace(training.account.statement(), by_group=(found,))
        training.account.statement = lambda: stated
        return real(asked, training, *given)

    patch.setattr(training, "_result", leaky)


def statistics_of_the_records(patch: pytest.MonkeyPatch) -> None:
    """A mean of private records that is said to be public."""
    real = Shift.__init__

    def leaky(self: Any, mean: Any, *given: Any, **named: Any) -> None:
        if Path("visits.csv").exists():  # while it trains
            rows = Path("visits.csv").read_text().split()[1:]
            mean = np.full_like(mean, sum(int(row.split(",")[1]) for row in rows) / len(rows))
        real(self, mean, *given, **named)

    patch.setattr(Shift, "__init__", leaky)


PLACES = ("", "exported.safetensors/", "model/")
STATED = {f"{place}privacy.{kind}" for place in PLACES for kind in ("json", "md")}
WEIGHTS = {"exported.safetensors/model.safetensors", "model/model.safetensors"}


@pytest.mark.parametrize(
    ("leak", "seen"),
    [
        (a_loss_in_the_statement, STATED),
        pytest.param(statistics_of_the_records, WEIGHTS, marks=pytest.mark.slow),
    ],
)
def test_a_leak_with_a_model_is_seen(tmp_path: Path, leak: Any, seen: set[str]) -> None:
    rows = visits()
    with pytest.MonkeyPatch.context() as patch:
        leak(patch)
        one = released(tmp_path / "one", rows)
        other = released(tmp_path / "other", replaced(rows, 4))
    assert set(differences(one, other)) == seen
