"""What was released counts, whatever became of it: crash × resume × every way to end.

The oracle reads the journal with nothing but ``json``: how many rounds, and how often each was
released again with fresh noise. Every ε that a run shows or states must agree with it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from itertools import product

import pytest
from refusals import refuses
from stated import check_told_alike, over_draw, read, stated, written
from typer.testing import CliRunner

from dpscaffold import BadInput, Gaussian, Logistic, Plan, fedavg, load_model, synthetic, train
from dpscaffold.cli import app
from dpscaffold.engine import Engine

SECRET = Gaussian(clip=1.0, noise=3.0, secret=True)
SEEDED = Gaussian(clip=1.0, noise=3.0)
PLAN = Plan(rounds=9, local_steps=4, user_ratio=0.25, evaluate_every=2, checkpoint_every=3, seed=4)
DATA = {"alpha": 2, "beta": 2, "users": 12, "records": 100, "seed": 3}


class Crash(Exception):
    """The process dies here."""


@pytest.fixture(scope="module")
def federation():
    return synthetic(**DATA)


def go(federation, folder, privacy=SECRET, plan=PLAN, **options):
    return train(
        federation, Logistic(40, 10), fedavg(), plan, privacy, out=folder, resume=True, **options
    )


def die_after(last):
    """An observer that dies when a round is over but not yet in a checkpoint."""

    def observe(row):
        if row.round == last:
            raise Crash

    return observe


def crash(federation, folder, last, moment="after the round", **options):
    """Run until round ``last`` is journalled, then die before or after its uploads are used.

    Whether it came to that.
    """
    real = Engine.round

    def dies(self, state, *given):
        if state.round + 1 == last:
            raise Crash
        return real(self, state, *given)

    with pytest.MonkeyPatch.context() as patch:
        if moment == "before its uploads":
            patch.setattr(Engine, "round", dies)
        try:
            go(federation, folder, on_round=die_after(last), **options)
        except Crash:
            return True
    return False


def journalled(folder):
    """(rounds, repeats) as the file says."""
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    times = Counter(line["round"] for line in lines if "round" in line)
    assert set(times) == set(range(1, len(times) + 1))
    return len(times), tuple(sorted(count - 1 for count in times.values() if count > 1))


def released(folder, run):
    """ε towards the server of all that the journal says was released."""
    rounds, repeats = journalled(folder)
    return over_draw(run, rounds, again=sum(repeats))


def check(result):
    """The statement, returned and written, and the last shown ε are the journal's."""
    true = released(result.folder, result.setting.describe())
    assert result.privacy.towards("server").epsilon == pytest.approx(true, rel=1e-9)
    assert result.privacy.rounds == journalled(result.folder)[0]
    check_told_alike(result.folder)


def stop_in_first_round():
    sent = []

    def observe(row):
        if not sent:
            sent.append(row.round)
            signal.raise_signal(signal.SIGTERM)

    return observe


def watching(folder, run, then):
    """An observer that compares the ε of every round it is shown with the journal's."""

    def observe(row):
        assert row["epsilon_server"] >= released(folder, run) * (1 - 1e-9)
        if then:
            then(row)

    return observe


#: How often it dies and when, and the noise: two crashes with both kinds of noise, and three in one
#: round where each release counts.
FAST = [((5, 8), SECRET), ((5, 8), SEEDED), ((2, 2, 2), SECRET)]
OTHER = [((2, 2, 2), SEEDED), *product([(8,), (8, 8)], [SECRET, SEEDED])]


@pytest.mark.parametrize("ending", ["completed", "interrupted"])
@pytest.mark.parametrize("moment", ["before its uploads", "after the round"])
@pytest.mark.parametrize(
    ("crashes", "privacy"),
    [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHER)],
)
def test_every_epsilon_counts_what_was_lost(federation, tmp_path, ending, moment, privacy, crashes):
    """Kill × resume × {completion, SIGTERM}: what is stated is what the journal says."""
    folder, run = tmp_path / "run", described(federation, privacy)
    privacy = privacy.changed(delta="1/records")
    for last in crashes:
        assert crash(federation, folder, last, moment, privacy=privacy)
    then = stop_in_first_round() if ending == "interrupted" else None
    on_round = watching(folder, run, then)
    result = go(federation, folder, privacy, on_round=on_round)
    assert result.ended == ending
    check(result)
    _, repeats = journalled(folder)
    assert bool(repeats) == privacy.secret  # without a seed a replay is a second release


def described(federation, privacy):
    from dpscaffold.config import make_run

    return make_run(federation.roster, Logistic(40, 10), fedavg(), PLAN, privacy).describe(
        "1/records"
    )


def test_a_statement_is_withdrawn_before_more_is_released(federation, tmp_path):
    """A model and its statement, then more rounds and a kill: the statement would be too small, so
    it goes, and the model with it."""
    folder, longer = tmp_path / "run", PLAN.changed(rounds=12)
    go(federation, folder)
    assert written(folder).rounds == 9 and load_model(folder).privacy == written(folder)
    with pytest.raises(Crash):
        go(federation, folder, plan=longer, on_round=die_after(11))
    assert stated(folder).rounds == 11
    with refuses("run-unfinished"):
        load_model(folder)
    assert load_model(go(federation, folder, plan=longer).folder).privacy.rounds == 12


CHILD = """
import sys, time
from dpscaffold import Gaussian, Logistic, Plan, fedavg, synthetic, train

def observe(row):
    if row.round == 8:
        print("ready", flush=True)
        time.sleep(60)

train(synthetic({data}), Logistic(40, 10), fedavg(), {plan}, {privacy}, out=sys.argv[1],
      on_round=observe)
"""


def test_kill_nine_and_two_processes(federation, tmp_path):
    """A second process is kept out while the first lives; killed, its releases are all counted."""
    data = ", ".join(f"{key}={value}" for key, value in DATA.items())
    code = CHILD.format(data=data, plan=PLAN, privacy=SECRET)
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        before = contents(tmp_path / "run")
        with refuses(f"folder-in-use: ({child.pid})"):
            go(federation, tmp_path / "run")
        answer = CliRunner().invoke(app, ["privacy", str(tmp_path / "run"), "--json"])
        assert answer.exit_code == 0 and read(json.loads(answer.stdout)).rounds == 8
        assert contents(tmp_path / "run") == before
    finally:
        child.kill()
        child.wait(timeout=30)
        child.stdout.close()
    assert child.returncode == -signal.SIGKILL and journalled(tmp_path / "run") == (8, ())
    result = go(federation, tmp_path / "run")
    assert journalled(tmp_path / "run") == (9, (1, 1))  # rounds 7 and 8 once more
    check(result)
    writers = [
        json.loads(line)["process"]
        for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()
    ]
    assert len(set(writers)) == 2 and writers == sorted(writers, key=writers.index)


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_second_run_in_one_folder_is_refused_for_the_life_of_the_first(
    federation, tmp_path, monkeypatch
):
    """Resumed or begun, from the first round to the last; afterwards the folder is free."""
    monkeypatch.setattr("dpscaffold.atomic.PATIENCE", 0.0)
    heard = []

    def intrude(row):
        for resume in (True, False):
            try:
                train(
                    federation,
                    Logistic(40, 10),
                    fedavg(),
                    PLAN,
                    SECRET,
                    out=tmp_path / "run",
                    resume=resume,
                )
            except BadInput as error:
                heard.append(str(error))

    go(federation, tmp_path / "run", on_round=intrude)
    assert len(heard) == 18
    assert sum(f"another process ({os.getpid()}) is at work" in text for text in heard) == 9
    assert sum("already holds a run" in text for text in heard) == 9
    check(go(federation, tmp_path / "run"))


@pytest.mark.parametrize("size", [1, 40, -1])
def test_a_torn_line_bricks_no_run(federation, tmp_path, size):
    """The beginning of a line that was never finished is a round that never ran."""
    folder = tmp_path / "run"
    crash(federation, folder, 8)
    line = (folder / "ledger.jsonl").read_bytes().splitlines(keepends=True)[-1]
    with (folder / "ledger.jsonl").open("ab") as stream:
        stream.write(line.replace(b'"round": 8', b'"round": 9')[:-1][:size])
    assert stated(folder).rounds == 8
    check(go(federation, folder))


SPAWNING = """
import sys
held = []

def hear(event, arguments):
    if event == "fcntl.flock":
        held.append(event)
    if held and event in ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"):
        print("started while locked:", arguments, flush=True)

sys.addaudithook(hear)
from dpscaffold import Gaussian, Logistic, Plan, fedavg, synthetic, train
train(synthetic(users=4, records=30), Logistic(40, 10), fedavg(), Plan(rounds=1, user_ratio=0.5),
      Gaussian(noise=1.0), out=sys.argv[1])
print("locked", len(held))
"""


def test_no_process_is_started_while_a_folder_is_locked(tmp_path):
    """Killed while it starts another, a process would leave that one its lock for a moment, and
    whoever resumes at once would be told that somebody is at work."""
    answer = subprocess.run(
        [sys.executable, "-c", SPAWNING, str(tmp_path / "run")], capture_output=True, text=True
    )
    assert answer.stdout == "locked 1\n", answer.stdout + answer.stderr


def test_a_lock_that_outlives_its_process_for_a_moment(federation, tmp_path):
    """What another library starts may hold it until its program has begun."""
    import threading

    from dpscaffold.runs.folder import RunFolder

    crash(federation, tmp_path / "run", 5)
    other = RunFolder(tmp_path / "run")
    other.lock()
    timer = threading.Timer(0.1, other.release)
    timer.start()
    check(go(federation, tmp_path / "run"))
    timer.join()
