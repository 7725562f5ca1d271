"""A federation by e-mail: three folders as three sites, and files that are refused."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from refusals import refuses
from scipy.stats import kstest, norm
from statistical.captured import ALARM, uncorrelated
from statistical.test_noise import scale_is
from typer.testing import CliRunner

from dpscaffold import BadInput, load_model
from dpscaffold.cli import app
from dpscaffold.deployment.protocol.messages import (
    fingerprint,
    new_key,
    pack,
    public_of,
    sign,
    unpack,
)
from dpscaffold.deployment.site.begin import BEGUN
from dpscaffold.deployment.site.file import read_site_file
from dpscaffold.deployment.site.ledger import SiteLedger
from dpscaffold.deployment.site.operation import ledger_of
from dpscaffold.deployment.site.reading import read_records
from dpscaffold.models.model import Model
from dpscaffold.privacy import round_up
from dpscaffold.randomness.csprng import CipherStream
from dpscaffold.report.runs import read_run
from dpscaffold.runs.ledger import read_account
from dpscaffold.sums import files, site
from dpscaffold.sums.combine import combine, write_run
from dpscaffold.sums.files import read_key_file, read_sums, write_sums
from dpscaffold.sums.plan import load_plan
from dpscaffold.sums.site import make_keys, make_sums, read_sums_site

NAMES = ("north", "south", "west")
PLAN = """
[schema]
features = ["age", "pressure"]
label = "ill"
classes = ["no", "yes"]
prepare = [{{ step = "standardise", fit = "public", mean = [50.0, 130.0], deviation = 50.0 }}]

[privacy]
{noise}
delta = 1e-6
sampling = "poisson"

[sums]
members = ["north", "south", "west"]
{more}
"""


class Mail:
    """A plan and three sites with their tables."""

    def __init__(self, folder: Path, noise="epsilon = 1.0", more=""):
        self.folder, self.path = folder, folder / "plan.toml"
        self.path.write_text(PLAN.format(noise=noise, more=more))
        self.plan = load_plan(self.path)
        rng = np.random.default_rng(0)
        self.rows = {name: self._table(name, rng) for name in NAMES}

    def _table(self, name, rng):
        make_keys(self.plan, name, self.folder / name)
        age, pressure = rng.integers(20, 90, 60), rng.integers(90, 170, 60)
        ill = age + pressure > 185
        lines = [
            f"{a},{p},{'yes' if i else 'no'}" for a, p, i in zip(age, pressure, ill, strict=True)
        ]
        (self.folder / name / "records.csv").write_text("\n".join(["age,pressure,ill", *lines]))
        path = self.folder / name / "site.toml"
        path.write_text(path.read_text().replace("epsilon = 2.0 ", "epsilon = 1e6 ")
                        .replace("epsilon_alone = 20.0", "epsilon_alone = 1e6"))  # fmt: skip
        return np.stack([age, pressure], 1), ill

    def keys(self):
        return [self.folder / name / f"{name}.sumkey" for name in NAMES]

    def confirm(self):
        found = {
            n: fingerprint(read_key_file(k).public) for n, k in zip(NAMES, self.keys(), strict=True)
        }
        for name in NAMES:
            path = self.folder / name / "site.toml"
            lines = "".join(f'{n} = "{f}"\n' for n, f in found.items() if n != name)
            head, _, tail = path.read_text().partition("[policy]")
            path.write_text(f"{head}{lines}[policy]{tail}")

    def make(self, name, keys=()):
        return make_sums(self.plan, self.folder / name / "site.toml", keys)

    def sums(self, keys=()):
        return [self.make(name, keys).path for name in NAMES]

    def ledger(self, name):
        return SiteLedger(self.folder / name / "state" / "ledger.jsonl", name)


def exact(mail):
    """Σ f over all sites' records, from the definition, without noise."""
    rows = np.concatenate([x for x, _ in mail.rows.values()])
    labels = np.concatenate([y for _, y in mail.rows.values()])
    features = ((torch.tensor(rows).float() - torch.tensor([50.0, 130.0])) * 0.02).float()
    return -mail.plan.task.contributions(features, torch.tensor(labels).long(), True).sum(0)


@pytest.mark.parametrize("more", ["", "colluders = 1"])
def test_three_sites_make_a_model_by_files(tmp_path, more):
    """With little noise the total is the exact sum; masks cancel and leave nothing behind."""
    mail = Mail(tmp_path, "noise = 0.05", more)
    keys = mail.keys() if more else ()
    if more:
        mail.confirm()
    made = mail.sums(keys)
    words = [read_sums(path).words for path in made]
    total = mail.plan.grid.restore(mail.plan.grid.integers(sum(words)))
    assert total.tolist() == pytest.approx(exact(mail).tolist(), abs=1.0)
    combined = combine(mail.plan, made)
    assert combined.records == pytest.approx(180, abs=2)
    said = write_run(mail.plan, combined, tmp_path / "model")
    assert read_run(tmp_path / "model").privacy == said  # as report reads it
    assert read_account(tmp_path / "model").statement() == said  # as privacy reads it
    assert said.epsilon == combined.privacy.epsilon and not said.seeded
    assert said.held == "sites"
    assert (said.towards("alone").epsilon is None) == (not more) == (said.run.secure is None)
    model = load_model(tmp_path / "model")
    x, y = mail.rows["north"]
    right = np.mean(
        [said == ("yes" if ill else "no") for said, ill in zip(model.named(x), y, strict=True)]
    )
    assert right > 0.85
    assert read_account(tmp_path / "model").ledger.run.query == "sums"
    for name in NAMES:
        runs = list(mail.ledger(name).runs.values())
        assert [run.participations for run in runs] == [1]
        assert [run.account["terms"]["query"] for run in runs] == ["sums"]  # not of gradients
        secret = list((tmp_path / name / "state" / "sums").glob("*.key"))
        assert len(secret) == (0 if more else 1)  # a key that was used is erased


def test_a_masked_file_alone_looks_random(tmp_path):
    """One site's words are uniform: half of all bits are set, and the total of two is no sum."""
    mail = Mail(tmp_path, "noise = 0.05", "colluders = 1")
    mail.confirm()
    words = [read_sums(path).words for path in mail.sums(mail.keys())]
    for some in (words[0], words[0] + words[1]):
        share = np.unpackbits(some.view(np.uint8)).mean()
        assert abs(share - 0.5) < 5 * 0.5 / np.sqrt(64 * len(some))


def test_masks_save_noise_and_the_statement_says_so(tmp_path):
    """Three sites, one colluder: √2 times less noise for the same ε, and ε alone is larger."""
    for name in "ab":
        (tmp_path / name).mkdir()
    plain, masked = Mail(tmp_path / "a"), Mail(tmp_path / "b", more="colluders = 1")
    ratio = plain.plan.deviation / masked.plan.deviation
    assert ratio == pytest.approx(np.sqrt(2), rel=1e-3)
    masked.confirm()
    made = [masked.make(name, masked.keys()) for name in NAMES]
    said = combine(masked.plan, [one.path for one in made]).privacy
    assert said.towards("server").epsilon == pytest.approx(1.0, rel=1e-3)
    assert said.towards("alone").epsilon > 1.3
    assert "at most 1" in said.towards("server").words and "unbroken" in dict(said.needs)
    # The site has another δ than the plan: ε of its ledger by its own account, in closed form.
    assert made[0].delta == 5e-6
    for epsilon, noise in ((made[0].epsilon, np.sqrt(2)), (made[0].epsilon_alone, 1.0)):
        mu = 1 / (2 * masked.plan.setting.privacy.noise * noise)
        delta = norm.cdf(mu / 2 - epsilon / mu) - np.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
        assert delta == pytest.approx(made[0].delta, rel=1e-2)


@pytest.mark.parametrize("more", ["", "colluders = 1"])
def test_a_repeated_sum_is_stated_as_often_as_it_was_made(tmp_path, more):
    """Whoever combines attempt 3 may have the files of attempts 1 and 2 too: three Gaussians of the
    noise that one of them has, in closed form."""
    mail = Mail(tmp_path, more=more)
    once = mail.plan.setting.privacy.noise
    mail.path.write_text(PLAN.format(noise="epsilon = 1.0", more=f"{more}\nattempt = 3"))
    mail.plan = load_plan(mail.path)
    assert mail.plan.setting.privacy.noise == once
    for name in NAMES:
        make_keys(mail.plan, name, tmp_path / name)
    if more:
        mail.confirm()
    made = combine(mail.plan, mail.sums(mail.keys() if more else ()))
    said = write_run(mail.plan, made, tmp_path / "model")
    assert read_account(tmp_path / "model").statement() == said
    hidden = np.sqrt(2) if more else 1.0
    views = [(each.towards("server"), hidden) for each in (said, made.privacy)]
    views += [(said.towards("third_party"), hidden)]
    if more:
        views += [(each.towards("alone"), 1.0) for each in (said, made.privacy)]
    else:
        views += [(said.towards("participant"), 1.0)]
    for view, others in views:
        mu = np.sqrt(3) / (2 * once * others)
        epsilon = view.epsilon
        delta = norm.cdf(mu / 2 - epsilon / mu) - np.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
        assert epsilon > 1.5 and delta == pytest.approx(1e-6, rel=1e-2)


def test_new_key_files_are_no_new_attempt(tmp_path):
    """A masked sum that failed is a release too: it is repeated under the next number alone."""
    mail = Mail(tmp_path, more="colluders = 1")
    mail.confirm()
    mail.make("north", mail.keys())
    for name in NAMES:
        make_keys(mail.plan, name, tmp_path / name)
    with refuses("session-spent: sums.attempt to 2"):
        mail.make("north", mail.keys())
    assert mail.ledger("north").total == 1


@pytest.mark.parametrize("more", ["", "colluders = 1"])
def test_the_noise_of_a_file_is_what_the_statement_counts(tmp_path, more):
    """2C·σ in every coordinate of every file, new each time: less or more is rejected."""
    mail = Mail(tmp_path, "noise = 3.0", more)
    held = read_records(
        read_sums_site(tmp_path / "north" / "site.toml").data,
        tmp_path / "north",
        mail.plan.offer.rows,
    )
    rows, labels = mail.rows["north"]
    features = ((torch.tensor(rows).float() - torch.tensor([50.0, 130.0])) * 0.02).float()
    sums = mail.plan.task.contributions(features, torch.tensor(labels).long(), True).sum(0)
    drawn = [site.noised_words(mail.plan, held, CipherStream()) for _ in range(400)]
    grid = mail.plan.grid
    files = np.stack([grid.restore(grid.integers(words)).numpy() for words in drawn])
    noise, scale = files + sums.numpy(), 2 * 1.0 * 3.0
    assert scale_is(noise, scale)
    for wrong in (0.5, 0.9, 1.1, 2.0):
        assert not scale_is(noise * wrong, scale)
    assert kstest(noise.ravel() / scale, "norm").pvalue > ALARM
    assert uncorrelated(noise[:-1], noise[1:]) and uncorrelated(noise[:, :-1], noise[:, 1:])


def test_a_file_is_rounded_after_its_noise_was_added(tmp_path):
    """Sums and noise that are whole steps and a third each round to one step more together than
    one by one; the proof is about rounding their sum."""
    mail = Mail(tmp_path, "noise = 3.0")
    held = read_records(
        read_sums_site(tmp_path / "north" / "site.toml").data,
        tmp_path / "north",
        mail.plan.offer.rows,
    )
    grid = mail.plan.grid

    def integers(noise):
        stream = SimpleNamespace(standard_normal=lambda count: np.asarray(noise, np.float64))
        return grid.integers(site.noised_words(mail.plan, held, stream)).numpy()

    count, step = mail.plan.task.parameters, grid.step / mail.plan.deviation
    steps = np.stack([integers(np.full(count, share * step)) for share in np.arange(0, 1, 0.05)])
    risen = steps - steps[0]
    assert set(np.unique(risen)) <= {0, 1}
    early = (risen[10] == 1).mean()  # half a step of noise lifts some sums and not others
    assert 0 < early < 1


def test_the_commands_show_both_epsilons(tmp_path):
    """sums combine, privacy and report say the same of a folder, under the same names."""
    mail = Mail(tmp_path, more="colluders = 1")
    mail.confirm()
    made = mail.sums(mail.keys())
    said = []
    for words in (
        ["sums", "combine", mail.path, *made, "--out", tmp_path / "model"],
        ["privacy", tmp_path / "model"],
        ["report", tmp_path / "model", "--out", tmp_path / "report.html"],
    ):
        answer = CliRunner().invoke(app, [str(word) for word in words])
        assert answer.exit_code == 0, answer.output
        said.append(" ".join(answer.stdout.split()))
    stated = read_run(tmp_path / "model").privacy
    alone = stated.towards("alone")
    page = (tmp_path / "report.html").read_text()
    for text in (said[1], page):
        assert alone.words in text and round_up(alone.epsilon) in text
        assert round_up(stated.epsilon) in text
    assert round_up(stated.epsilon) in said[0]
    assert "imulated secure sums" not in page


def test_epsilon_alone_limits_all_sums_together(tmp_path):
    """A second sum that would exceed it is refused, whatever is left of ε, and spends nothing."""
    mail = Mail(tmp_path, "epsilon = 2.0", more="colluders = 1")
    mail.confirm()
    first = mail.make("north", mail.keys()).epsilon_alone
    mail.path.write_text(PLAN.format(noise="epsilon = 1.0", more="colluders = 1\nattempt = 2"))
    mail.plan = load_plan(mail.path)
    for name in NAMES:
        make_keys(mail.plan, name, tmp_path / name)
    second = mail.make("west", mail.keys()).epsilon_alone
    path = tmp_path / "north" / "site.toml"
    text = path.read_text()
    for together, fits in ((first + 0.9 * second, False), (first + 1.1 * second, True)):
        assert together / 2 > second  # the share of one sum is no limit here
        path.write_text(text.replace("epsilon_alone = 1e6", f"epsilon_alone = {together}"))
        if fits:
            assert mail.make("north", mail.keys()).epsilon_alone == second
        else:
            with refuses("site-refuses: epsilon_alone"):
                mail.make("north", mail.keys())
        assert mail.ledger("north").total == 1 + fits


def test_the_file_of_a_deployed_site_serves_for_sums_by_mail(tmp_path):
    """One site.toml, one ledger, one meaning of [secure]."""
    mail = Mail(tmp_path, more="colluders = 1")
    mail.confirm()
    path = tmp_path / "north" / "site.toml"
    coordinator = public_of(new_key())
    lines = f'server = "h:1"\ncoordinator = "{coordinator}"\n'
    path.write_text(lines + path.read_text())
    made = mail.make("north", mail.keys())
    (line,) = ledger_of(path)["runs"]  # as 'dpscaffold site ledger' reads it
    assert line["epsilon_spent"] == made.epsilon < line["epsilon_alone_spent"]
    assert line["epsilon_alone_spent"] == made.epsilon_alone and line["query"] == "sums"
    assert read_site_file(path).policy.secure.members == read_sums_site(path).policy.secure.members


def test_masked_sums_need_a_secure_table_and_its_terms(tmp_path):
    """No table, more colluders feared, more members wanted; and no bare sums where masks are."""
    mail = Mail(tmp_path, more="colluders = 1")
    mail.confirm()
    path = tmp_path / "north" / "site.toml"
    text = path.read_text()
    table = text[text.index("[secure]") : text.index("[policy]")]
    for changed in (
        text.replace(table, ""),
        text.replace("colluders = 1 ", "colluders = 2 ").replace("least = 3 ", "least = 4 "),
        text.replace("least = 3 ", "least = 4 "),
    ):
        path.write_text(changed)
        with refuses("site-refuses: secure"):
            mail.make("north", mail.keys())
    (tmp_path / "bare").mkdir()
    bare = Mail(tmp_path / "bare")
    path = tmp_path / "bare" / "north" / "site.toml"
    path.write_text(path.read_text().replace("colluders = 1 ", "required = true\ncolluders = 1 "))
    with refuses("site-refuses: secure.required"):
        bare.make("north")
    for one in (mail, bare):
        assert one.ledger("north").total == 0


def test_a_site_that_was_cut_short_is_made_by_the_same_command(tmp_path):
    """A part of its signing key is there, and its file is not. Without the mark of a beginning no
    key is replaced."""
    mail = Mail(tmp_path)
    (tmp_path / "north" / "site.toml").unlink()
    with refuses("keys-exist"):
        make_keys(mail.plan, "north", tmp_path / "north")
    (tmp_path / "north" / "site.key").write_bytes(b"-----BEGIN")
    (tmp_path / "north" / BEGUN).touch()
    made = make_keys(mail.plan, "north", tmp_path / "north")
    own = public_of(site.read_signing_key(tmp_path / "north" / "site.key"))
    assert read_key_file(made).public == own


def test_a_session_that_was_only_reserved_goes_on(tmp_path, monkeypatch):
    """Nothing was computed before the participation was counted, so the same grant is used."""
    mail = Mail(tmp_path)
    monkeypatch.setattr(SiteLedger, "participate", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        mail.make("north")
    monkeypatch.undo()
    (booked,) = mail.ledger("north").runs.values()
    made = mail.make("north")
    (run,) = mail.ledger("north").runs.values()
    assert not made.again and run.participations == 1 and run.grant == booked.grant


def test_a_combination_that_was_cut_short_is_made_by_the_same_command(tmp_path, monkeypatch):
    """Under its name there is a whole folder or none."""
    mail = Mail(tmp_path)
    made = combine(mail.plan, mail.sums())
    monkeypatch.setattr(Model, "save", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_run(mail.plan, made, tmp_path / "model")
    monkeypatch.undo()
    assert not (tmp_path / "model").exists()
    write_run(mail.plan, made, tmp_path / "model")
    assert load_model(tmp_path / "model").privacy == read_run(tmp_path / "model").privacy


def test_a_second_call_gives_the_same_file_and_spends_nothing(tmp_path):
    mail = Mail(tmp_path)
    first = mail.make("north").path.read_bytes()
    again = mail.make("north")
    assert again.again and again.path.read_bytes() == first
    assert mail.ledger("north").total == 1


def test_a_session_that_was_cut_short_is_never_repeated(tmp_path, monkeypatch):
    """The line in the ledger comes first; without a stored file the session is spent."""
    mail = Mail(tmp_path)

    def cut(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(site, "noised_words", cut)
    with pytest.raises(KeyboardInterrupt):
        mail.make("north")
    monkeypatch.undo()
    assert mail.ledger("north").total == 1
    with pytest.raises(BadInput) as refused:
        mail.make("north")
    assert refused.value.code == "session-spent"


def test_the_policy_limits_what_all_sums_spend(tmp_path):
    mail = Mail(tmp_path)
    path = tmp_path / "north" / "site.toml"
    path.write_text(path.read_text().replace("epsilon = 1e6 ", "epsilon = 1.0 "))
    with pytest.raises(BadInput) as refused:
        mail.make("north")
    assert refused.value.code == "site-refuses" and mail.ledger("north").total == 0


def test_unconfirmed_members_count_as_colluders(tmp_path):
    mail = Mail(tmp_path, more="colluders = 1")
    with pytest.raises(BadInput) as refused:
        mail.make("north", mail.keys())
    assert refused.value.code == "not-confirmed" and mail.ledger("north").total == 0


def test_a_copied_key_is_refused(tmp_path):
    """A member that sends somebody else's mask key as its own would make two masks cancel."""
    mail = Mail(tmp_path, more="colluders = 1")
    mail.confirm()
    said = json.loads(mail.keys()[1].read_text())
    said["key"] = json.loads(mail.keys()[0].read_text())["key"] | {"name": "south"}
    mail.keys()[1].write_text(json.dumps(said))
    with pytest.raises(BadInput) as refused:
        mail.make("west", mail.keys())
    assert refused.value.code == "bad-signature"


@pytest.mark.parametrize("lacking", [1, 2])
def test_all_key_files_are_needed_once(tmp_path, lacking):
    mail = Mail(tmp_path, more="colluders = 1")
    mail.confirm()
    keys = mail.keys()
    given = keys[:-lacking] + keys[: lacking - 1]
    with pytest.raises(BadInput) as refused:
        mail.make("north", given)
    assert refused.value.code == "bad-members"


def forged(mail, name, header=None, words=None, resign=True):
    """A site's file with something changed, signed by its owner or left as it was."""
    path = mail.make(name).path
    message = unpack(path.read_bytes())
    vectors = dict(message.vectors)
    if words is not None:
        vectors["sums"] = files.as_vector(words)
    changed = {**message.header, **(header or {})}
    key = site.read_signing_key(mail.folder / name / "site.key")
    made = sign(changed, vectors, key)
    if not resign:
        made = replace(made, signature=message.signature)
    path.write_bytes(pack(made))
    return path


@pytest.mark.parametrize(
    ("header", "words", "resign", "code"),
    [
        ({"version": "0.0.1"}, None, True, "version-differs"),
        ({"plan": "0" * 64}, None, True, "other-federation"),
        ({"session": "0" * 64}, None, True, "other-federation"),
        ({"site": "south"}, None, True, "combined-twice"),
        ({"site": "east"}, None, True, "bad-members"),
        ({"masked": 1}, None, True, "not-a-sums-file"),
        ({"format": "sums 2"}, None, True, "not-a-sums-file"),
        ({}, np.zeros(5, "<u8"), True, "wrong-shape"),
        ({}, np.zeros(12, "<u8"), False, "bad-signature"),
        ({"public": "ed25519:00"}, None, True, "bad-signature"),
    ],
)
def test_hostile_files_are_refused(tmp_path, header, words, resign, code):
    mail = Mail(tmp_path)
    others = [mail.make(name).path for name in ("south", "west")]
    bad = forged(mail, "north", header, words, resign)
    with pytest.raises(BadInput) as refused:
        combine(mail.plan, [bad, *others])
    assert refused.value.code == code


def test_huge_integers_wrap_and_give_finite_numbers(tmp_path):
    """No word is a NaN; the largest ones move the model and nothing else."""
    mail = Mail(tmp_path)
    others = [mail.make(name).path for name in ("south", "west")]
    size = mail.plan.task.parameters
    bad = forged(mail, "north", words=np.full(size, 2**63 - 1, "<u8"))
    made = combine(mail.plan, [bad, *others])
    assert bool(torch.isfinite(made.model.params).all())


def test_a_missing_file_and_a_foreign_one_are_refused(tmp_path):
    mail = Mail(tmp_path)
    made = mail.sums()
    with pytest.raises(BadInput) as refused:
        combine(mail.plan, made[:2])
    assert refused.value.code == "bad-members"
    foreign = load_plan_with(tmp_path, mail, "epsilon = 0.9")
    with pytest.raises(BadInput) as refused:
        combine(foreign, made)
    assert refused.value.code == "other-federation"


def load_plan_with(folder, mail, noise):
    path = folder / "other.toml"
    path.write_text(PLAN.format(noise=noise, more=""))
    return load_plan(path)


@pytest.mark.parametrize("content", [b"", b"{}", b"dpscaffold letter 1\n", b"\xff" * 200])
def test_rubbish_is_not_a_file_of_ours(tmp_path, content):
    path = tmp_path / "x.sums"
    path.write_bytes(content)
    for read, code in ((read_sums, "not-a-sums-file"), (read_key_file, "not-a-key-file")):
        with pytest.raises(BadInput) as refused:
            read(path)
        assert refused.value.code == code


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("attempt = 1", "colluders = 2", "sums.colluders is 2"),
        ("attempt = 1", '[algorithm]\nname = "fedavg"', "more than one sum"),
        ("delta = 1e-6", "", "delta is missing"),
        ('"west"]', '"north"]', "every site once"),
        ('"poisson"', '"poisson"\nunit = "user"', "single records"),
    ],
)
def test_plans_that_cannot_be_are_refused(tmp_path, old, new, named):
    path = tmp_path / "plan.toml"
    path.write_text(PLAN.format(noise="epsilon = 1.0", more="attempt = 1").replace(old, new))
    with refuses(f"bad-members|no-privacy|missing-key|not-a-sum: {named}"):
        load_plan(path)


def test_a_file_signed_by_another_key_of_the_same_name_is_seen(tmp_path):
    """Nobody vouches for a key but its fingerprint, which `check` shows."""
    mail = Mail(tmp_path)
    genuine = read_sums(mail.make("north").path)
    other = tmp_path / "fake.sums"
    other.write_bytes(write_sums(mail.plan, genuine.session, "north", genuine.words, new_key()))
    assert read_sums(other).fingerprint != genuine.fingerprint
