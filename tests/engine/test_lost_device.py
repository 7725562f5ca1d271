"""A device that gives up in a run: one sentence, a whole checkpoint, and a way to go on."""

from __future__ import annotations

import pytest
import torch
from typed import typed

from dpscaffold import Gaussian, Logistic, Plan, scaffold, synthetic, train
from dpscaffold.engine.device import full_precision
from dpscaffold.engine.work import Work
from dpscaffold.errors import DeviceLost

CONFIG = """
[data]
source = "synthetic"
users = 6
records = 40
[algorithm]
name = "scaffold"
[plan]
rounds = 5
local_steps = 2
user_ratio = 0.5
checkpoint_every = 1
[privacy]
clip = 0.5
noise = 2.0
"""


def giving_up(monkeypatch, after: int, kind: type[Exception] = RuntimeError):
    """Rounds whose device gives up at call ``after``, as CUDA says it: in several lines."""
    calls, real = [], Work._part

    def part(self, *given):
        calls.append(1)
        if len(calls) == after:
            raise kind("CUDA error: unspecified launch failure\nCompile with TORCH_USE_CUDA_DSA")
        return real(self, *given)

    monkeypatch.setattr(Work, "_part", part)


def command(monkeypatch, capsys, *words: str) -> tuple[int, str]:
    """A command's exit status and what it said on the way."""
    status, _, said = typed(monkeypatch, capsys, *words)
    return status, said


@pytest.mark.parametrize("after", [1, 4])
def test_a_run_ends_in_a_sentence_and_goes_on_where_it_was_stored(
    tmp_path, monkeypatch, capsys, after
):
    config, out = tmp_path / "run.toml", tmp_path / "run"
    config.write_text(CONFIG)
    words = ("train", str(config), "--out", str(out), "--device", "cpu")
    with monkeypatch.context() as faulty:
        giving_up(faulty, after)
        status, said = command(faulty, capsys, *words)
    where = "checkpoint of round 3" if after == 4 else "beginning"
    assert status == 5 and "Traceback" not in said
    assert said.strip().splitlines()[-1] == (
        f"error: device is cpu, and it gave up in round {after} (CUDA error: unspecified launch "
        f"failure); once it is back, the run continues from its {where} with --resume"
    )
    assert command(monkeypatch, capsys, *words, "--resume")[0] == 0
    whole = tmp_path / "whole"
    assert command(monkeypatch, capsys, *words[:3], str(whole), *words[4:])[0] == 0
    ends = [torch.load(folder / "checkpoint.pt", weights_only=False) for folder in (out, whole)]
    assert torch.equal(*(end["state"]["params"] for end in ends))
    assert ends[0]["state"]["round"] == 5


def test_a_run_without_a_folder_says_that_nothing_is_stored(monkeypatch):
    class Accelerator(RuntimeError):
        pass

    monkeypatch.setattr(torch, "AcceleratorError", Accelerator, raising=False)

    def broken(self, *_):
        raise Accelerator("the link is down")

    monkeypatch.setattr(Work, "_part", broken)
    data, plan = synthetic(users=4, records=20), Plan(rounds=2, local_steps=2, user_ratio=0.5)
    with pytest.raises(DeviceLost, match=r"round 1 \(the link is down\); nothing of the run"):
        train(data, Logistic(40, 10), scaffold(), plan, Gaussian(clip=0.5, noise=1.0))


def test_other_errors_stay_what_they_are(monkeypatch):
    def broken(self, *_):
        raise RuntimeError("sizes differ")

    monkeypatch.setattr(Work, "_part", broken)
    data, plan = synthetic(users=4, records=20), Plan(rounds=2, local_steps=2, user_ratio=0.5)
    with pytest.raises(RuntimeError, match="sizes differ") as found:
        train(data, Logistic(40, 10), scaffold(), plan)
    assert not isinstance(found.value, DeviceLost)


def test_a_gpus_products_are_not_in_tf32():
    flags = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [one.allow_tf32 for one in flags]
    try:
        for one in flags:
            one.allow_tf32 = True
        full_precision()
        assert not any(one.allow_tf32 for one in flags)
    finally:
        for one, was in zip(flags, before, strict=True):
            one.allow_tf32 = was
