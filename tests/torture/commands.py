"""Every command that writes, as a :class:`~works.Work`, and how often it is killed."""

from __future__ import annotations

import shlex
from typing import Any

from federated import (
    a_site_behind,
    combined,
    counted_once,
    keyed,
    mail_sites,
    mailed,
    make_mail,
    recovered,
    roster,
    site_made,
)
from works import (
    DATASET,
    MIRROR,
    Result,
    Work,
    audited,
    budget_opened,
    downloaded,
    keys_made,
    onnx_inputs,
    prepared,
    published,
    reserved,
    same,
    trained,
    trained_secretly,
    typed,
)

RESUMED = ["train", "run.toml", "--out", "run", "--resume"]
SECRET = ["--set", "privacy.secret=true", "--data-key", "records.key"]
FILED = ["--set", "privacy.budget_file=budget.jsonl"]
#: Commands that are not killed here, and why.
EXCUSED = {
    "data list": "prints",
    "server start": "a process of a deployment: tests/deploy/test_processes.py kills it",
    "server run": "a process of a deployment: tests/deploy/test_processes.py kills it",
    "site start": "a process of a deployment: tests/deploy/test_processes.py kills it",
    "server status": "prints",
    "site check": "prints",
    "site ledger": "prints",
    "site requests": "prints",
    "provision renew": "a file and a folder, each replaced whole",
    "site renew": "two files, each replaced whole; finished by the same command",
    "site audit": "prints",
    "site approve": "one line of a journal, then one file that is replaced whole",
    "site refuse": "as site approve",
    "site status": "prints",
    "sums check": "prints",
}


def killed(
    name: str, command: str, result: Result | None = None, again: str = "", **given: Any
) -> Work:
    """A command that is typed so, and so when it is run again."""
    return Work(name, shlex.split(command), result, shlex.split(again), **given)


def replacing(name: str, command: str, *outputs: str, **given: Any) -> Work:
    """A command whose files are the same, byte for byte, however often it is run."""
    return killed(name, command, same(*outputs), outputs=outputs, **given)


def drawing(name: str, command: str, *outputs: str, **given: Any) -> Work:
    """A command whose files differ from run to run, as figures and times do."""
    return killed(name, command, outputs=outputs or ("figure.png",), **given)


def all_works() -> list[Work]:
    """Every command that writes."""
    run = ("run/model/model.json", "run/config.toml")  # journals may end in a part of a line
    secretly, filed = RESUMED + SECRET, RESUMED + SECRET + FILED
    csv = "--set data.path=rows.csv --set data.label=ill --set data.user=site"
    prepare = "data prepare run.toml --out stored"
    table = f"data prepare --source csv --out stored {csv}"
    audit = f"audit run.toml --trials 100 --view server {' '.join(FILED)} --one-run 12"
    audit = f"{audit} --set privacy.secret=true --out"
    facts = "--users 6 --records 20 --features 2 --classes 2 --epsilon 8"
    files = [f"fetched/{DATASET}/{name}.bin" for name in ("one", "two")]
    tuned = ("tuning/best.toml", "tuning/tuning.csv", "tuning/tuning.png", "tuning/TUNING.md")
    plan = ("planned/plan.toml", "planned/plan.json", "planned/plan.png")
    demo = [f"demo/{name}/metrics.jsonl" for name in ("dp-scaffold", "dp-fedavg", "dp-fedsgd")]
    paper = [f"paper/figure1/{name}" for name in ("figure.png", "results.parquet", "RESULT.md")]
    sums = ["model/model/privacy.json", "model/config.toml", "model/ledger.jsonl"]
    opened = "privacy budget.jsonl --epsilon 40 --delta 0.01"
    runs = [f"train run.toml --out {name} --set plan.rounds=2" for name in ("one", "two")]
    drafted = "init rows.csv --label ill --user site --out rows.toml"
    on_rows = (drafted, "train rows.toml --out rowed --set plan.rounds=2")
    rowed: dict[str, Any] = {"prepare": typed(*on_rows)}
    answered = "predict rowed 'rows.*' --out replaced.csv"
    federation = ("provision sites.toml --out keys", "site init keys/one.invitation --out one")
    admitted = "server admit one/one.site --server keys/server"
    return [
        Work("train", RESUMED, trained, outputs=run, weight=6),
        Work("train secret", secretly, trained_secretly, outputs=run, weight=6),
        Work("train reserved", filed, reserved, prepare=typed(opened), outputs=run, weight=6),
        killed("data prepare", prepare, prepared, f"{prepare} --overwrite", weight=3),
        killed("data prepare table", table, prepared, f"{table} --overwrite", weight=2),
        killed(
            "data download",
            f"data download {DATASET} --data-dir fetched --mirror {MIRROR}",
            downloaded,
            prepare=published,
            outputs=tuple(files),
        ),
        drawing("data describe", "data describe run.toml --out figure.png"),
        killed("budget", opened, budget_opened),
        replacing(
            "init",
            f"{drafted} --force",
            "rows.toml",
        ),
        killed(
            "tune",
            "tune tune.toml --out tuning --quiet",
            same(*tuned[:2]),
            outputs=tuned,
            weight=2,
        ),
        replacing(
            "report",
            "report one two --out report.html",
            "report.html",
            "report.md",
            prepare=typed(*runs, "report one --out report.html"),
        ),
        drawing("compare", "compare one two --out figure.png", prepare=typed(*runs)),
        killed(
            "audit one run",
            f"{audit} audited",
            audited,
            f"{audit} audited-again",
            prepare=typed(opened),
        ),
        *(
            replacing(f"predict {name}", f"predict rowed rows.csv --out {name}", name, **rowed)
            for name in ("answers.csv", "answers.parquet")
        ),
        replacing(
            "predict several files again",
            answered,
            "replaced.csv",
            prepare=typed(*on_rows, answered),
        ),
        drawing("evaluate", "evaluate rowed rows.csv --figure figure.png", **rowed),
        *(
            killed(
                name,
                f"{command} --out own",
                same("own/model.safetensors", "own/model.json"),
                outputs=("own/model.json",),
                **rowed,
            )
            for name, command in (
                ("export", "export rowed --to safetensors"),
                ("personalise", "personalise rowed rows.csv"),
            )
        ),
        drawing("export torch", "export rowed --to torch --out model.pt2", "model.pt2", **rowed),
        killed("export onnx", "export rowed --to onnx --out model.onnx", onnx_inputs, **rowed),
        killed(
            "provision",
            "provision new sites.toml --out keys",
            keys_made,
            outputs=("keys/one.invitation", "keys/two.invitation"),
        ),
        killed(
            "site init",
            federation[1],
            site_made,
            prepare=typed(federation[0]),
            outputs=("one/site.toml",),
        ),
        killed(
            "site recover", "site recover one/site.toml --yes", recovered, prepare=a_site_behind
        ),
        killed(
            "server admit",
            admitted,
            roster,
            prepare=typed(*federation),
        ),
        killed(
            "server remove",
            "server remove one --server keys/server",
            roster,
            prepare=typed(*federation, admitted),
        ),
        killed(
            "sums keys",
            "sums keys mail.toml --name north --out north",
            keyed,
            outputs=("north/site.toml", "north/north.sumkey"),
        ),
        Work("sums make", make_mail("north"), counted_once, prepare=mail_sites, weight=2),
        killed(
            "sums combine",
            "sums combine mail.toml north/north.sums south/south.sums --out model",
            combined,
            prepare=mailed,
            outputs=tuple(sums),
        ),
        drawing(
            "demo",
            "demo --out demo --rounds 2 --quiet",
            "demo/comparison.png",
            "demo/scaffold/metrics.jsonl",
            *demo,
        ),
        killed(
            "plan",
            f"plan {facts} --rounds 3 --local-steps 2 --out planned -q",
            same(plan[0]),
            outputs=plan,
        ),
        drawing(
            "reproduce",
            "reproduce figure1 --row 'K = 50' --scale 0.01 --seeds 1 --out paper -q",
            *paper,
        ),
    ]
