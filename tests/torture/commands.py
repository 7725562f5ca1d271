"""Every command that writes, as a :class:`~works.Work`, and how often it is killed."""

from __future__ import annotations

from collections.abc import Callable

from federated import (
    a_federation,
    a_mail_plan,
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
    Work,
    a_run_on_rows,
    an_old_prediction,
    an_old_report,
    audited,
    budget_opened,
    downloaded,
    exists,
    files_under,
    onnx_inputs,
    open_budget,
    prepared,
    published,
    reserved,
    same_bytes,
    same_text,
    trained,
    trained_secretly,
    two_runs,
)

RESUMED = ["train", "run.toml", "--out", "run", "--resume"]
SECRET = ["--set", "privacy.secret=true", "--data-key", "records.key"]
FILED = ["--set", "privacy.budget_file=budget.jsonl"]
BUDGETED = [*SECRET, *FILED]
KEYED = [*RESUMED, *BUDGETED, "--data-key", "records.key"]
PREPARE = ["data", "prepare", "run.toml", "--out", "stored"]
TABLE = ["data", "prepare", "--source", "csv", "--out", "stored"]
TABLE += [
    part
    for name in ("path=rows.csv", "label=ill", "user=site")
    for part in ("--set", f"data.{name}")
]
PLANNED = ["plan", "--users", "6", "--records", "20", "--features", "2", "--classes", "2"]
PLANNED += ["--epsilon", "8", "--rounds", "3", "--local-steps", "2", "--out", "planned", "-q"]
REPRODUCED = ["reproduce", "figure1", "--row", "K = 50", "--scale", "0.01", "--seeds", "1"]
REPRODUCED += ["--out", "paper", "-q"]
ONE_RUN = ["audit", "run.toml", "--trials", "100", "--view", "server", *FILED, "--one-run", "12"]
ONE_RUN += ["--set", "privacy.secret=true"]
DOWNLOAD = ["data", "download", DATASET, "--data-dir", "fetched", "--mirror", MIRROR]
FETCHED = (f"fetched/{DATASET}/one.bin", f"fetched/{DATASET}/two.bin")
RECOVER = ["site", "recover", "one/site.toml", "--yes"]
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
ROWED = ("--label", "ill", "--user", "site", "--out", "rows.toml")


def figure(name: str, *arguments: str, prepare: Callable[..., None] | None = None) -> Work:
    """A command that draws ``figure.png``."""
    work = Work(name, [*arguments, "figure.png"], exists("figure.png"), outputs=("figure.png",))
    work.prepare = prepare or work.prepare
    return work


def training() -> list[tuple[Work, int]]:
    """Runs, seeded, secret and on a budget file."""
    outputs = ("run/model/model.json", "run/metrics.jsonl", "run/ledger.jsonl", "run/config.toml")
    return [
        (Work("train", RESUMED, trained, outputs=outputs), 6),
        (Work("train secret", RESUMED + SECRET, trained_secretly, outputs=outputs), 6),
        (Work("train reserved", KEYED, reserved, prepare=open_budget, outputs=outputs), 6),
    ]


def quick() -> list[tuple[Work, int]]:
    """What takes about a second or less."""
    opened = ["privacy", "budget.jsonl", "--epsilon", "40", "--delta", "0.01"]
    tuned = ("tuning/tuning.csv", "tuning/tuning.png", "tuning/best.toml", "tuning/TUNING.md")
    return [
        (Work("data prepare", PREPARE, prepared, [*PREPARE, "--overwrite"]), 3),
        (Work("data prepare table", TABLE, prepared, [*TABLE, "--overwrite"]), 2),
        (Work("data download", DOWNLOAD, downloaded, prepare=published, outputs=FETCHED), 1),
        (figure("data describe", "data", "describe", "run.toml", "--out"), 1),
        (Work("budget", opened, budget_opened), 1),
        (
            Work(
                "init",
                ["init", "rows.csv", *ROWED, "--force"],
                same_text("rows.toml"),
                outputs=("rows.toml",),
            ),
            1,
        ),
        (
            Work(
                "tune",
                ["tune", "tune.toml", "--out", "tuning", "--quiet"],
                same_text("tuning/best.toml", "tuning/tuning.csv"),
                outputs=tuned,
            ),
            2,
        ),
        (
            Work(
                "report",
                ["report", "one", "two", "--out", "report.html"],
                same_text("report.html"),
                prepare=an_old_report,
                outputs=("report.html", "report.md"),
            ),
            1,
        ),
        (figure("compare", "compare", "one", "two", "--out", prepare=two_runs), 1),
        (
            Work(
                "audit one run",
                [*ONE_RUN, "--out", "audited"],
                audited,
                [*ONE_RUN, "--out", "audited-again"],
                prepare=open_budget,
            ),
            1,
        ),
    ]


def models() -> list[tuple[Work, int]]:
    """What is done with a trained model."""

    def answering(name: str) -> Work:
        arguments = ["predict", "rowed", "rows.csv", "--out", name]
        return Work(
            f"predict {name}", arguments, same_bytes(name), prepare=a_run_on_rows, outputs=(name,)
        )

    shown = ("evaluate", "rowed", "rows.csv", "--figure")
    replaced = Work(
        "predict several files again",
        ["predict", "rowed", "rows.*", "--out", "replaced.csv"],
        same_bytes("replaced.csv"),
        prepare=an_old_prediction,
        outputs=("replaced.csv",),
    )
    return [
        (answering("answers.csv"), 1),
        (replaced, 1),
        (answering("answers.parquet"), 1),
        (figure("evaluate", *shown, prepare=a_run_on_rows), 1),
        (
            Work(
                "export",
                ["export", "rowed", "--to", "safetensors", "--out", "handed"],
                same_bytes("handed/model.safetensors", "handed/model.json"),
                prepare=a_run_on_rows,
                outputs=("handed/model.json",),
            ),
            1,
        ),
        (
            Work(
                "personalise",
                ["personalise", "rowed", "rows.csv", "--out", "own"],
                same_bytes("own/model.safetensors", "own/model.json"),
                prepare=a_run_on_rows,
                outputs=("own/model.json",),
            ),
            1,
        ),
        (
            Work(
                "export torch",
                ["export", "rowed", "--to", "torch", "--out", "model.pt2"],
                exists("model.pt2"),
                prepare=a_run_on_rows,
            ),
            1,
        ),
        (
            Work(
                "export onnx",
                ["export", "rowed", "--to", "onnx", "--out", "model.onnx"],
                onnx_inputs,
                prepare=a_run_on_rows,
            ),
            1,
        ),
    ]


def federations() -> list[tuple[Work, int]]:
    """A deployment's files; its processes are killed in ``tests/deploy``."""
    made = ["site", "init", "keys/one.invitation", "--out", "one"]
    admitted = ["server", "admit", "one/one.site", "--server", "keys/server"]
    removed = ["server", "remove", "one", "--server", "keys/server"]

    def provisioned(folder: object) -> None:
        from works import done

        done(folder, ["provision", "sites.toml", "--out", "keys"])  # type: ignore[arg-type]

    def with_one(folder: object) -> None:
        from works import done

        a_federation(folder)  # type: ignore[arg-type]
        done(folder, admitted)  # type: ignore[arg-type]

    invitations = ("keys/one.invitation", "keys/two.invitation")
    return [
        (
            Work(
                "provision",
                ["provision", "new", "sites.toml", "--out", "keys"],
                files_under("keys"),
                outputs=invitations,
            ),
            1,
        ),
        (Work("site init", made, site_made, prepare=provisioned, outputs=("one/site.toml",)), 1),
        (Work("site recover", RECOVER, recovered, prepare=a_site_behind), 1),
        (Work("server admit", admitted, roster, prepare=a_federation), 1),
        (Work("server remove", removed, roster, prepare=with_one), 1),
    ]


def by_mail() -> list[tuple[Work, int]]:
    """A federation by e-mail, with masked sums."""
    files = ["mail.toml", "north/north.sums", "south/south.sums"]
    keys = ["sums", "keys", "mail.toml", "--name", "north", "--out", "north"]
    outputs = ("north/site.toml", "north/north.sumkey")
    whole = ("model/model/privacy.json", "model/config.toml", "model/ledger.jsonl")
    made = ["sums", "combine", *files, "--out", "model"]
    return [
        (Work("sums keys", keys, keyed, prepare=a_mail_plan, outputs=outputs), 1),
        (Work("sums make", make_mail("north"), counted_once, prepare=mail_sites), 2),
        (Work("sums combine", made, combined, prepare=mailed, outputs=whole), 1),
    ]


def slow() -> list[tuple[Work, int]]:
    """What takes seconds."""
    shown = ["demo", "--out", "demo", "--rounds", "2", "--quiet"]
    compared = ("demo/comparison.png", *(f"demo/{name}/metrics.jsonl" for name in DEMO_RUNS))
    planned = ("planned/plan.toml", "planned/plan.json", "planned/plan.png")
    paper = ("figure.png", "results.parquet", "RESULT.md")
    return [
        (Work("demo", shown, exists(*compared), outputs=compared), 1),
        (Work("plan", PLANNED, same_text("planned/plan.toml"), outputs=planned), 1),
        (
            Work(
                "reproduce",
                REPRODUCED,
                exists(*(f"paper/figure1/{name}" for name in paper)),
                outputs=tuple(f"paper/figure1/{name}" for name in paper),
            ),
            1,
        ),
    ]


DEMO_RUNS = ("dp-scaffold", "dp-fedavg", "dp-fedsgd", "scaffold")


def all_works() -> list[tuple[Work, int]]:
    """Every command that writes, and how often it is killed for each time that a plotting one
    is."""
    return [*training(), *quick(), *models(), *federations(), *by_mail(), *slow()]
