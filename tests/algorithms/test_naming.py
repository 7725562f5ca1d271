"""The registry is the single truth: names and numbers come from it, and from users' own files."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from contextlib import chdir
from pathlib import Path

import pytest
from refusals import refuses
from stated import read
from typed import done_here
from typer.testing import CliRunner

from dpscaffold import algorithms
from dpscaffold.algorithms import ALGORITHMS, ITERATIVE, SERVERS, fedavg
from dpscaffold.algorithms.naming import _from_file, build, own_failures
from dpscaffold.cli import app, main
from dpscaffold.config import AlgorithmSettings, load, parse
from dpscaffold.errors import Diverged

EXAMPLES = Path(__file__).parents[2] / "examples"

#: K·s = 1, so that FedSGD may run it too.
TOML = """
[data]
source = "synthetic"
users = 6
records = 20
[plan]
rounds = 3
local_steps = 5
user_ratio = 0.5
warm_rounds = 1
evaluate_every = 3
[privacy]
noise = 2.0
"""

OWN = """
from dataclasses import dataclass
from dpscaffold import fedavg
from neighbour import FACTOR

@dataclass(frozen=True)
class Scaled:
    by: float
    def __call__(self, gradient, y, at):
        return FACTOR * self.by * gradient

def scaled(by: float = 1.0):
    return fedavg().replace(name="scaled", title="Scaled", direction=Scaled(by), numbers={"by": by})

def shy(by):
    return scaled(by)

def wrong():
    return "fedavg"

def failing():
    raise KeyError("oh")
"""


@pytest.fixture
def config(tmp_path):
    """A configuration with a user's own file, and its neighbour, next to it."""
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "neighbour.py").write_text("FACTOR = 0.5\n")
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    path = tmp_path / "run.toml"
    path.write_text(TOML)
    return path


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.mark.parametrize(
    "server", [None, *(pytest.param(server, marks=pytest.mark.slow) for server in SERVERS)]
)
@pytest.mark.parametrize("name", ITERATIVE)
def test_every_algorithm_trains_through_toml(name, server, config, tmp_path):
    """Each entry of the registry, alone and under each server optimiser, from the command line."""
    extra = ["--set", f"algorithm.server={server}"] if server else []
    out = tmp_path / "out"
    done = run("train", config, "--set", f"algorithm.name={name}", *extra, "--out", out, "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    made = build(name, server)
    assert said["algorithm"] == f"DP-{made.shown}" and said["rounds"] == 3
    assert read(said["privacy"]).run.memory == made.memory
    kept = load(out / "config.toml").algorithm
    assert kept.build() == made


def test_a_new_entry_is_known_everywhere(monkeypatch, config, tmp_path):
    """One line in the table: configuration, labels, accounting and its command follow."""
    remembering = ALGORITHMS["scaffold"]().replace(name="newcomer", title="Newcomer")
    monkeypatch.setitem(ALGORITHMS, "newcomer", lambda strength=2.0: remembering)
    settings = parse({"algorithm": {"name": "newcomer"}})
    assert settings.algorithm.model_dump(exclude_none=True) == {"name": "newcomer", "strength": 2.0}
    done = run(
        "train", config, "--set", "algorithm.name=newcomer", "--out", tmp_path / "o", "--json"
    )
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["algorithm"] == "DP-Newcomer"
    numbers = ["--users", 100, "--records", 100, "--rounds", 5, "--local-steps", 1]
    numbers += ["--user-ratio", 0.2, "--data-ratio", 0.2, "--noise", 5.0, "--json"]
    memories = {}
    for name in ("newcomer", "fedavg"):
        said = run("privacy", *numbers, "--algorithm", name)
        assert said.exit_code == 0, said.output
        memories[name] = read(json.loads(said.stdout)).run.memory
    assert memories == {"newcomer": True, "fedavg": False}


def test_a_file_beside_the_configuration(config, tmp_path):
    """``my_file:factory`` with its own number, from another working folder."""
    config.write_text(TOML + '[algorithm]\nname = "mine:scaled"\nby = 4\n')
    out = tmp_path / "elsewhere" / "out"
    out.parent.mkdir()
    with chdir(out.parent):
        done = done_here("train", config, "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["algorithm"] == "DP-Scaled"
    assert '\nname = "mine:scaled"\nby = 4' in (out / "config.toml").read_text()
    twice, base = load(config), load(config, ["algorithm.by=2", "algorithm.name=mine:scaled"])
    assert twice.algorithm.build().direction.by == 4 and base.algorithm.build().direction.by == 2
    assert load(config).algorithm.build() == twice.algorithm.build()
    assert float(twice.algorithm.build().direction(1.0, None, None)) == 2.0


def test_an_own_file_on_the_command_line(config, monkeypatch):
    """In the working folder, for train and for privacy."""
    monkeypatch.chdir(config.parent)
    done = run("train", "run.toml", "--set", "algorithm.name=mine:scaled", "--out", "out")
    assert done.exit_code == 0, done.output
    numbers = ["--users", 100, "--records", 100, "--rounds", 5, "--local-steps", 1]
    numbers += ["--user-ratio", 0.2, "--data-ratio", 0.2, "--noise", 5.0]
    assert run("privacy", *numbers, "--algorithm", "mine:scaled").exit_code == 0


def test_the_example_is_what_its_page_says(tmp_path):
    """examples/feddyn.toml trains FedDyn from the file next to it."""
    done = run(
        "train", EXAMPLES / "feddyn.toml", "--set", "plan.rounds=2", "--set", "data.users=10",
        "--set", "data.records=40", "--out", tmp_path / "out", "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["algorithm"] == "DP-FedDyn" and said["final"]["dual_norm"] > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["algorithm.name=fedavgg"], r"algorithm.name is 'fedavgg' \(did you mean 'fedavg'\?\); "),
        (
            ["algorithm.name=absent:make"],
            "there is no file absent.py in .*next to the configuration",
        ),
        (["algorithm.name=broken:make"], r"import failed .*nothing_of_that_name.*fix broken.py"),
        (["algorithm.name=mine:nobody"], "mine has no function 'nobody'"),
        (["algorithm.name=mine:OWN"], "mine has no function 'OWN'"),
        (["algorithm.name=mine:wrong"], "returned 'fedavg'; the factory must return"),
        (["algorithm.name=mine:failing"], "factory failed with KeyError: 'oh'"),
        (
            ["algorithm.name=mine:shy"],
            "failed with TypeError: .* missing 1 required .* 'by'; fix it",
        ),
        (
            ["algorithm.name=fedprox", "algorithm.mv=1"],
            r"algorithm.mv for fedprox; known here: name, server, mu",
        ),
        (["algorithm.mu=0.1"], "unknown key algorithm.mu for scaffold; known here: name, server$"),
        (["algorithm.name=fedprox", "algorithm.mu=-1"], "algorithm.mu is -1; it must be 0 or"),
        (["algorithm.server=momentun"], r"algorithm.server is 'momentun' \(did you mean"),
        (["algorithm.server=adam", "algorithm.beta2=1"], r"algorithm.beta2 is 1; it must lie in"),
        (["algorithm.beta=0.5"], "unknown key algorithm.beta for scaffold"),
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(
    changes, message, config, tmp_path, monkeypatch, capsys
):
    """Exit status 2, the sentence on stderr, no folder."""
    out = tmp_path / "out"
    sets = [word for change in changes for word in ("--set", change)]
    said = refusal(["train", config, *sets, "--out", out], monkeypatch, capsys)
    assert re.search(message, said), said
    assert not out.exists()


def refusal(arguments, monkeypatch, capsys) -> str:
    """What the command says on stderr when it ends with status 2."""
    monkeypatch.setattr(sys, "argv", ["dpscaffold", *(str(word) for word in arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def test_names_of_algorithms_stand_in_the_registry_alone() -> None:
    """And in what is an application of them: the paper's experiments, and the demo's four runs."""
    root = Path(algorithms.__file__).parents[1]
    for path in root.rglob("*.py"):
        place = path.relative_to(root).as_posix()
        if place.startswith(("algorithms/", "paper/")) or place == "cli/demo.py":
            continue
        texts = (node.value for node in ast.walk(ast.parse(path.read_text("utf-8")))
                 if isinstance(node, ast.Constant))  # fmt: skip
        assert not {text for text in texts if isinstance(text, str)} & ALGORITHMS.keys(), place


def test_a_text_is_no_number(config) -> None:
    with refuses("not-a-number: algorithm.by is 'much' … 1.0"):
        load(config, ["algorithm.name=mine:scaled", "algorithm.by=much"])
    with refuses("not-a-number: algorithm.beta is 'much'"):
        load(config, ["algorithm.server=momentum", "algorithm.beta=much"])


def test_the_command_line_names_its_own_option(monkeypatch, capsys):
    """As --algorithm, not as a key of a file."""
    numbers = ["--users", 9, "--records", 9, "--rounds", 5, "--local-steps", 1]
    numbers += ["--user-ratio", 0.5, "--data-ratio", 0.5, "--noise", 5.0]
    said = refusal(["privacy", *numbers, "--algorithm", "fedavgg"], monkeypatch, capsys)
    assert "--algorithm is 'fedavgg' (did you mean 'fedavg'?)" in said


def test_settings_spell_their_numbers_out():
    """As they are stored: the algorithm's, then the server's."""
    dumped = AlgorithmSettings(name="fedprox", server="momentum", beta=0.5).model_dump()
    assert dumped == {"name": "fedprox", "server": "momentum", "mu": 0.1, "beta": 0.5}
    with refuses("not-text: algorithm.name"):
        parse({"algorithm": {"name": 3}})


def test_the_registry_is_read_without_torch():
    """So that commands which only account or help start light."""
    script = (
        "import sys; from dpscaffold.algorithms.naming import build; "
        "build('fedprox'); build('scaffold-warm', 'adam'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
    assert fedavg().shown == "FedAvg"


def test_a_changed_file_is_not_taken_for_the_one_that_began(config, tmp_path, monkeypatch, capsys):
    """The configuration names the file; the setting knows what was in it."""
    (tmp_path / "later.py").write_text(OWN)
    config.write_text(TOML + '[algorithm]\nname = "later:scaled"\n')
    assert run("train", config, "--out", tmp_path / "out").exit_code == 0
    (tmp_path / "later.py").write_text(OWN.replace("class Scaled", "class Other").replace(
        "Scaled(by)", "Other(by)"))  # fmt: skip
    _from_file.cache_clear()
    said = refusal(["train", config, "--out", tmp_path / "out", "--resume"], monkeypatch, capsys)
    assert "holds a run with algorithm.direction" in said


FAILING = """
from dpscaffold import fedavg

def told(name): return lambda: fedavg().replace(name="own", direction=name)

def key(gradient, y, at):
    return gradient - at.memory["nope"]

lost = told(key)
nothing = told(lambda gradient, y, at: None)
short = told(lambda gradient, y, at: gradient[..., :3])
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "lost",
            "which failed in a round with KeyError: 'nope' (own_failing.py, line 7); fix it",
        ),
        ("nothing", "which failed in a round with TypeError"),
        ("short", "which failed in a round with RuntimeError"),
    ],
)
def test_what_fails_in_a_round_is_one_sentence(name, said, config, tmp_path):
    (config.parent / "own_failing.py").write_text(FAILING)
    words = ["--set", f"algorithm.name=own_failing:{name}"]
    done = done_here("train", config, *words, "--out", tmp_path / "o")
    assert done.returncode == 2, done.stderr
    said = f"error: algorithm.name is 'own_failing:{name}', {said}"
    assert said in " ".join(done.stderr.split())


def test_a_fault_of_ours_keeps_its_traceback():
    with pytest.raises(KeyError), own_failures("scaffold"):
        raise KeyError("ours")
    with pytest.raises(Diverged), own_failures("own:own"):
        raise Diverged("it says what to do")
