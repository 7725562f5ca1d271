"""Neighbours by name, δ in the open, and every ε that is shown rounded up."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from privacy.explicit_pairs import gaussian_epsilon
from privacy.settings import SMALL, run_of
from privacy.test_commands import SYNTHETIC, answer, call, refused, without
from refusals import refuses
from small import federation
from typer.testing import CliRunner

import dpscaffold
from dpscaffold import Budget, Gaussian, Logistic, Plan, fedavg, train
from dpscaffold.cli import app
from dpscaffold.config import parse
from dpscaffold.data import load_federation, prepare
from dpscaffold.engines import Loop, Simulator
from dpscaffold.federation import Federation, Records
from dpscaffold.privacy import RANDOM_PARTICIPATION, Mechanism, PrivacyError, round_up, statement
from dpscaffold.randomness.streams import Randomness
from dpscaffold.runs.history import HistoryRow
from dpscaffold.setting import Setting
from dpscaffold.training.events import RoundDone
from dpscaffold.training.progress import Progress

POISSON = Gaussian(noise=4.0, sampling="poisson")
PLAN = Plan(rounds=2, local_steps=2, user_ratio=1.0, data_ratio=0.5)


def setting(data: Federation, privacy: Gaussian | None = POISSON, **plan: object) -> Setting:
    return Setting(data.roster, Logistic(4, 3), fedavg(), Plan(**{**vars(PLAN), **plan}), privacy)


def without_one(data: Federation, user: int) -> Federation:
    """The same federation, but for the last training record of a user."""
    tables = [data.train.of(i) for i in range(data.users)]
    tables[user] = (tables[user][0][:-1], tables[user][1][:-1])
    train = Records.from_users([x for x, _ in tables], [y for _, y in tables])
    return Federation(train, data.test, data.classes, declared_sizes=data.declared_sizes)


class TestNames:
    @pytest.mark.parametrize(
        ("changes", "name"),
        [
            ({}, "replace-one"),
            ({"sampling": "poisson"}, "zero-out"),
            ({"sampling": "poisson", "declared_sizes": True}, "add-remove"),
            ({"unit": "user"}, "replace-one"),
            ({"unit": "user", "sampling": "poisson", "declared_sizes": True}, "replace-one"),
        ],
    )
    def test_every_run_names_its_neighbours(self, changes, name):
        run = run_of(SMALL, **changes)
        said = statement(run)
        assert run.relation == said["mechanism"]["relation"] == name
        assert said["server"]["neighbours"].endswith(f"({name})") and f"({name};" in re.sub(
            r".*\(([a-z-]+)\);", r"(\1;", said["quote"]
        )
        assert Mechanism.from_dict(json.loads(json.dumps(run.to_dict()))) == run

    def test_zero_out_is_what_another_library_calls_replace_special(self):
        """Poisson batches, gradient against zero: the sum moves by C, half of what σ_g counts."""
        from dp_accounting import NeighboringRelation, dp_event
        from dp_accounting.pld import PLDAccountant

        run = run_of(SMALL, sampling="poisson", cohort_size=10, rounds=4)
        accountant = PLDAccountant(NeighboringRelation.REPLACE_SPECIAL)
        step = dp_event.PoissonSampledDpEvent(0.2, dp_event.GaussianDpEvent(2 * run.noise))
        accountant.compose(step, run.rounds * run.local_steps)
        assert RANDOM_PARTICIPATION.epsilon(run) == pytest.approx(
            accountant.get_epsilon(run.delta), rel=5e-3
        )

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ({"neighbours": "zero-out"}, "not proved for fixed batches; give 'replace-one'"),
            ({"neighbours": "add-remove"}, "not proved for fixed batches"),
            ({"neighbours": "replace-one", "sampling": "poisson"}, "give 'zero-out' or"),
            ({"neighbours": "zero-out", "sampling": "poisson", "unit": "user"}, "a user as unit"),
            ({"neighbours": "all"}, "neighbours='all' is unknown"),
        ],
    )
    def test_what_is_not_proved_is_refused(self, given, words):
        with pytest.raises(PrivacyError) as refusal:
            Gaussian(noise=1.0, **given)
        assert words in str(refusal.value)
        options = [part for key, value in given.items() for part in (f"--{key}", value)]
        assert words in refused("privacy", *SYNTHETIC, *options)

    def test_on_the_command_line(self):
        options = [*SYNTHETIC, "--sampling", "poisson"]
        zero = answer("privacy", *options)
        true = answer("privacy", *options, "--neighbours", "add-remove")
        assert zero["mechanism"]["relation"] == "zero-out"
        assert true["mechanism"]["relation"] == "add-remove"
        assert zero["server"]["epsilon"] == true["server"]["epsilon"]
        solved = without(options, "--noise")
        found = answer("calibrate", *solved, "--epsilon", "1", "--neighbours", "zero-out")
        assert found["epsilon"] <= 1.0

    def test_add_remove_needs_declared_sizes(self, tmp_path):
        wanted = Gaussian(noise=4.0, sampling="poisson", neighbours="add-remove")
        with refuses("sizes-not-declared: data.declared_sizes"):
            setting(federation(), wanted)
        assert setting(federation().declaring(10), wanted).describe().relation == "add-remove"
        zero = Gaussian(noise=4.0, sampling="poisson", neighbours="zero-out")
        assert setting(federation().declaring(10), zero).describe().relation == "zero-out"
        with refuses("not-applicable"):
            setting(federation().declaring(10), Gaussian(noise=4.0))
        with refuses("not-applicable"):
            setting(federation().declaring(10), None)
        with refuses("not-applicable"):
            prepare({"source": "digits", "users": 4, "declared_sizes": 9}, tmp_path / "out")
        for wrong in (0, [5, 5], [5] * 5 + [-1]):
            with refuses("count-differs: declared_sizes"):
                federation().declaring(wrong)


class TestDeclaredSizes:
    def test_nothing_that_is_accounted_or_scaled_tells_whether_a_record_is_there(self):
        whole = federation().declaring([10, 12, 5, 8, 14, 7])
        less = without_one(whole, 2)
        one, other = setting(whole), setting(less)
        assert one.describe().to_dict() == other.describe().to_dict()
        assert one.batch_sizes.tolist() == other.batch_sizes.tolist() == [5, 6, 2, 4, 7, 3]
        for weighting in ("uniform", "records"):
            assert setting(whole, weighting=weighting).sizes.tolist() == [10, 12, 5, 8, 14, 7]
        # Computed from the data they would reveal it: that is why it is called zero-out.
        bare = setting(federation()), setting(without_one(federation(), 2))
        assert bare[0].describe().to_dict() != bare[1].describe().to_dict()

    def test_the_rate_is_that_of_the_declared_size(self):
        """Of 60 records each is drawn with chance 8/40, whatever the 60: 5 standard errors, and
        8/60 is rejected."""
        drawn = Randomness(3).batches(1, 0, 60, 8, 4000, "poisson", declared=40)
        mean, error = drawn.count.mean(), (60 * 0.2 * 0.8 / 4000) ** 0.5
        assert abs(mean - 12) < 5 * error < abs(mean - 8)
        fewer = Randomness(3).batches(1, 0, 20, 4, 4000, "poisson", declared=40)  # numpy's choice
        assert abs(fewer.count.mean() - 2) < 5 * (20 * 0.1 * 0.9 / 4000) ** 0.5
        assert fewer.index.max() < 20

    def test_both_engines_draw_alike(self):
        data = federation().declaring([10, 12, 5, 8, 14, 7])
        arguments = (data, Logistic(4, 3), fedavg(), PLAN, POISSON)
        slow, fast = (train(*arguments, engine=name).params for name in ("loop", "simulator"))
        assert float((slow - fast).abs().max()) < 1e-5
        plain = train(federation(), *arguments[1:]).params
        assert float((fast - plain).abs().max()) > 1e-3
        assert Loop is not Simulator

    def test_from_a_configuration(self):
        tables = {"source": "digits", "users": 4, "declared_sizes": 300}
        data = load_federation(tables)
        assert data.declared_sizes == (300,) * 4
        limits = {"noise": 4.0, "sampling": "poisson", "neighbours": "add-remove"}
        plan = {"user_ratio": 0.5}
        run = parse({"data": tables, "plan": plan, "privacy": limits}).setting(data).describe()
        assert run.relation == "add-remove" and run.groups[0].records == 300


def test_a_user_as_unit_tells_nothing_of_sizes(tmp_path):
    """Runs on users of other sizes write the same account, and δ comes from M."""
    said = []
    for name, sizes in (("a", (9, 12, 4, 7, 15, 6)), ("b", (20, 5, 8, 30, 6, 11))):
        data = federation(sizes)
        folder = tmp_path / name
        private = Gaussian(noise=4.0, unit="user")
        train(data, Logistic(4, 3), fedavg(), PLAN, private, out=folder)
        ledger = json.loads((folder / "ledger.json").read_text())
        said.append(
            (
                {k: v for k, v in ledger.items() if k not in ("journal", "checksum")},
                {
                    k: v
                    for k, v in json.loads((folder / "privacy.json").read_text()).items()
                    if k != "journal"
                },
            )
        )
    assert said[0] == said[1]
    assert said[0][1]["delta"] == pytest.approx(1 / 60)
    assert said[0][1]["mechanism"]["rate"] is None


class TestDeltas:
    def test_epsilon_at_several_deltas_in_closed_form(self):
        run = run_of(SMALL, cohort_size=10, batch_sizes=100, local_steps=1, noise=6.0)
        said = statement(run)
        rows = said["epsilon_by_delta"]
        assert [row["delta"] for row in rows] == pytest.approx([1e-5, 1e-6, 1e-7, 1e-8])
        for row in rows:
            exact = gaussian_epsilon(row["delta"], run.rounds**0.5 / 6.0)
            for view in ("server", "third_party", "participant"):
                assert exact <= row[view] <= exact * 1.003
        assert rows[0]["server"] == said["server"]["epsilon"]
        shown = call("privacy", *SYNTHETIC).stdout
        assert "epsilon by delta, server: 0.861 at 2.5e-06, " in shown

    @pytest.mark.parametrize(("delta", "large"), [(1e-3, True), (0.5, True), (0.999e-3, False)])
    def test_a_delta_from_one_over_n_up_is_named(self, delta, large):
        said = statement(run_of(SMALL, delta=delta))  # 10 users with 100 records
        assert ("not below 1/1000" in (said["delta_note"] or "")) == large
        assert any("not below 1/1000" in line for line in said["outside"]) == large
        user = statement(run_of(SMALL, delta=0.1, unit="user"))
        assert "not below 1/10, one over the number of users" in user["delta_note"]

    def test_the_default_needs_no_sentence(self):
        assert statement(run_of({**SMALL, "delta": None}))["delta_note"] is None

    def test_a_configuration_may_name_the_papers(self):
        limits = {"noise": 4.0, "delta": "1/records"}
        plan = {"user_ratio": 0.5, "data_ratio": 0.5}
        setting = parse({"plan": plan, "privacy": limits}).setting(federation())
        assert setting.describe().delta == pytest.approx(1 / 53)
        assert Budget(delta="1/records").delta == "1/records"
        with refuses("not-a-number: privacy.delta"):
            parse({"privacy": {**limits, "delta": "1/users"}})

    def test_the_papers_experiments_name_theirs(self):
        from dpscaffold.paper.definition import experiment, names

        for name in names():
            for case in experiment(name).cases(1, 1.0)[:12]:
                if case.private:
                    assert case.settings.privacy.delta == "1/records", (name, case.labels)
        # Named or not, it is the same run: finished ones are found again.
        case = next(c for c in experiment("figure1").cases(1, 1.0) if c.private)
        unnamed = {**case.tables["privacy"]}
        del unnamed["delta"]
        assert (
            case.digest
            == type(case)(case.labels, {**case.tables, "privacy": unnamed}, case.schedule).digest
        )


#: What is left of a budget, which is rounded down or shown in full.
LEFT = [("budget_file.py", "{epsilon:.6g}"), ("budget.py", "{int(epsilon * 1000) / 1000:.3f}")]


class TestShown:
    @given(st.floats(0, 1e6, allow_nan=False), st.integers(0, 6))
    def test_never_smaller_than_it_is(self, value, digits):
        shown = Fraction(round_up(value, digits))
        assert Fraction(value) <= shown < Fraction(value) + Fraction(1, 10**digits)

    def test_named_cases(self):
        assert (round_up(0.86007), round_up(0.4105, 2)) == ("0.861", "0.42")
        assert (round_up(0.861), round_up(2.0), round_up(float("inf"))) == (
            "0.861",
            "2.000",
            "infinite",
        )

    def test_the_live_line(self):
        progress = Progress("DP-FedAvg", 10, quiet=True)
        row = HistoryRow(1, {"train_loss": 1.0, "epsilon_server": 0.41001})
        progress(RoundDone(1, 10, (), (row,)))
        assert "ε(server) ≤ 0.411" in progress.line(10, 1.0)

    def test_no_message_rounds_an_epsilon_by_itself(self):
        """Formats such as {epsilon:.3f} round to the nearest; :g is for what a user gave."""
        found = []
        for path in Path(dpscaffold.__file__).parent.rglob("*.py"):
            for place in re.findall(r"\{[^{}]*epsilon[^{}]*:\.\d*[fge]\}", path.read_text()):
                if (path.name, place) not in LEFT:
                    found.append((path.name, place))
        assert not found

    def test_the_docs_show_what_the_table_prints(self):
        from dpscaffold.report.privacy_table import comparison

        page = Path(__file__).parents[2] / "docs" / "published-bound.md"
        lines = page.read_text().splitlines()
        for row in comparison().splitlines()[2:]:
            assert row in lines


def test_the_statement_of_a_run_has_it_all(tmp_path):
    folder = tmp_path / "run"
    train(federation(), Logistic(4, 3), fedavg(), PLAN, POISSON, out=folder)
    page = (folder / "privacy.md").read_text()
    assert "## Epsilon by delta" in page and "(zero-out)" in page
    assert "add/remove" not in page
    assert "zero-out" in CliRunner().invoke(app, ["privacy", str(folder), "--all"]).stdout


def test_who_was_left_out_stands_in_the_statement(tmp_path):
    """The rule and, where records are the unit, who it was: u2 has one record. Towards whole users
    the name would tell of a user, so the rule stands alone."""
    rows = [f"{x},{x % 2},u{x % 2}" for x in range(40)] + ["1,1,u2"]
    (tmp_path / "rows.csv").write_text("\n".join(["a,label,user", *rows]) + "\n")
    tables = {
        "source": "csv",
        "path": str(tmp_path / "rows.csv"),
        "label": "label",
        "user": "user",
        "minimum_records": 5,
    }
    stored = prepare(tables, tmp_path / "stored")
    saved = {"source": "saved", "path": str(stored)}
    for data in (load_federation(tables), load_federation(saved)):
        assert data.users == 2
        plan = Plan(rounds=1, local_steps=1, user_ratio=1.0)
        for unit in ("record", "user"):
            privacy = Gaussian(noise=4.0, unit=unit)
            said = train(data, Logistic(1, 2), fedavg(), plan, privacy).privacy
            (sentence,) = [s for s in said["preprocessing"] if "left out before training" in s]
            assert "fewer than 5 records" in sentence
            assert ("u2" in json.dumps(said.to_json(), ensure_ascii=False)) == (unit == "record")
