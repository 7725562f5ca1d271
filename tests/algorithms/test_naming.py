"""The registry is the single truth: names and numbers come from it, and from users' own files."""

from __future__ import annotations

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

from dpscaffold.algorithms import ALGORITHMS, ITERATIVE, SERVERS, fedavg
from dpscaffold.algorithms.naming import _from_file, build, own_failures
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

def told(name): return lambda: fedavg().replace(name="own", direction=name)

def key(gradient, y, at):
    return gradient - at.memory["nope"]

lost = told(key)
nothing = told(lambda gradient, y, at: None)
short = told(lambda gradient, y, at: gradient[..., :3])
"""

#: A plan as options, for the command that only accounts.
NUMBERS = {"--users": 100, "--records": 100, "--rounds": 5, "--local-steps": 1}
NUMBERS |= {"--user-ratio": 0.2, "--data-ratio": 0.2, "--noise": 5.0}
PRIVACY = ["privacy", *(word for pair in NUMBERS.items() for word in pair)]


@pytest.fixture
def config(tmp_path):
    """A configuration with a user's own file, and its neighbour, next to it."""
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "neighbour.py").write_text("FACTOR = 0.5\n")
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    path = tmp_path / "run.toml"
    path.write_text(TOML)
    return path


def answer(*words):
    """What a command answers as JSON."""
    done = done_here(*words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def trained(config, *changes):
    """What training says, with these keys set."""
    sets = [word for change in changes for word in ("--set", change)]
    return answer("train", config, *sets, "--out", config.parent / "out")


def refusal(*words) -> str:
    """What a command says on stderr when it ends with status 2."""
    done = done_here(*words)
    assert done.returncode == 2, done.stderr
    return " ".join(done.stderr.split())


@pytest.mark.parametrize(
    "server", [None, *(pytest.param(server, marks=pytest.mark.slow) for server in SERVERS)]
)
@pytest.mark.parametrize("name", ITERATIVE)
def test_every_algorithm_trains_through_toml(name, server, config):
    """Each entry of the registry, alone and under each server optimiser, from the command line."""
    changes = [f"algorithm.name={name}", *([f"algorithm.server={server}"] if server else [])]
    said, made = trained(config, *changes), build(name, server)
    assert said["algorithm"] == f"DP-{made.shown}" and said["rounds"] == 3
    assert read(said["privacy"]).run.memory == made.memory
    assert load(config.parent / "out" / "config.toml").algorithm.build() == made


def test_a_new_entry_is_known_everywhere(monkeypatch, config):
    """One line in the table: configuration, labels, accounting and its command follow."""
    remembering = ALGORITHMS["scaffold"]().replace(name="newcomer", title="Newcomer")
    monkeypatch.setitem(ALGORITHMS, "newcomer", lambda strength=2.0: remembering)
    settings = parse({"algorithm": {"name": "newcomer"}})
    assert settings.algorithm.model_dump(exclude_none=True) == {"name": "newcomer", "strength": 2.0}
    assert trained(config, "algorithm.name=newcomer")["algorithm"] == "DP-Newcomer"
    for name, memory in (("newcomer", True), ("fedavg", False)):
        assert read(answer(*PRIVACY, "--algorithm", name)).run.memory == memory


def test_a_file_beside_the_configuration(config):
    """``my_file:factory`` with its own number, from another working folder."""
    config.write_text(TOML + '[algorithm]\nname = "mine:scaled"\nby = 4\n')
    (config.parent / "elsewhere").mkdir()
    with chdir(config.parent / "elsewhere"):
        assert trained(config)["algorithm"] == "DP-Scaled"
    stored = (config.parent / "out" / "config.toml").read_text()
    assert '\nname = "mine:scaled"\nby = 4' in stored
    four, two = (load(config, changes).algorithm.build() for changes in ([], ["algorithm.by=2"]))
    assert (four.direction.by, two.direction.by) == (4, 2)
    assert load(config).algorithm.build() == four
    assert float(four.direction(1.0, None, None)) == 2.0


def test_an_own_file_on_the_command_line(config):
    """In the working folder, for train and for privacy."""
    with chdir(config.parent):
        trained(config, "algorithm.name=mine:scaled")
        answer(*PRIVACY, "--algorithm", "mine:scaled")


def test_the_example_is_what_its_page_says(tmp_path):
    """examples/feddyn.toml trains FedDyn from the file next to it."""
    small = ["--set", "plan.rounds=2", "--set", "data.users=10", "--set", "data.records=40"]
    said = answer("train", EXAMPLES / "feddyn.toml", *small, "--out", tmp_path / "out")
    assert said["algorithm"] == "DP-FedDyn" and said["final"]["dual_norm"] > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("name=fedavgg", r"algorithm.name is 'fedavgg' \(did you mean 'fedavg'\?\); "),
        ("name=absent:make", "there is no file absent.py in .*next to the configuration"),
        ("name=broken:make", r"import failed .*nothing_of_that_name.*broken.py, line 1.; fix it"),
        ("name=mine:nobody", "mine has no function 'nobody'"),
        ("name=mine:OWN", "mine has no function 'OWN'"),
        ("name=mine.py:scaled", "'my_file:factory', without '.py'"),
        ("name=mine:", "'my_file:factory', without '.py'"),
        ("name=mine:wrong", "returned 'fedavg'; the factory must return"),
        ("name=mine:failing", "factory failed with KeyError: 'oh'"),
        ("name=mine:shy", "failed with TypeError: .* missing 1 required .* 'by'; fix it"),
        ("name=mine:scaled by=much", "algorithm.by is 'much'; it must be a number, 1.0 where it"),
        ("name=mine:lost", r"failed in a round with KeyError: 'nope' \(mine.py, line 27\); fix it"),
        ("name=mine:nothing", "failed in a round with TypeError"),
        ("name=mine:short", "failed in a round with RuntimeError"),
        ("name=fedprox mv=1", r"algorithm.mv for fedprox; known here: name, server, mu"),
        ("mu=0.1", "unknown key algorithm.mu for scaffold; known here: name, server$"),
        ("name=fedprox mu=-1", "algorithm.mu is -1; it must be 0 or"),
        ("server=momentun", r"algorithm.server is 'momentun' \(did you mean"),
        ("server=momentum beta=much", "algorithm.beta is 'much'; it must be a number, 0.9 where"),
        ("server=adam beta2=1", r"algorithm.beta2 is 1; it must lie in"),
        ("beta=0.5", "unknown key algorithm.beta for scaffold"),
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(changes, message, config):
    """Exit status 2, the sentence on stderr; no folder, unless a round has begun."""
    sets = [word for change in changes.split() for word in ("--set", f"algorithm.{change}")]
    said = refusal("train", config, *sets, "--out", config.parent / "out")
    assert re.search(message, said), said
    assert "in a round" in message or not (config.parent / "out").exists()


def test_the_command_line_names_its_own_option():
    """As --algorithm, not as a key of a file."""
    said = refusal(*PRIVACY, "--algorithm", "fedavgg")
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


def test_a_changed_file_is_not_taken_for_the_one_that_began(config):
    """The configuration names the file; the setting knows what was in it."""
    trained(config, "algorithm.name=mine:scaled")
    changed = OWN.replace("class Scaled", "class Other").replace("Scaled(by)", "Other(by)")
    (config.parent / "mine.py").write_text(changed)
    _from_file.cache_clear()
    words = ["--set", "algorithm.name=mine:scaled", "--out", config.parent / "out", "--resume"]
    assert "holds a run with algorithm.direction" in refusal("train", config, *words)


def test_a_fault_of_ours_keeps_its_traceback():
    with pytest.raises(KeyError), own_failures("scaffold"):
        raise KeyError("ours")
    with pytest.raises(Diverged), own_failures("own:own"):
        raise Diverged("it says what to do")
