"""``dpscaffold.flower``: a strategy and a client mod for somebody's own Flower app."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from refusals import refuses
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dpscaffold import Gaussian, Plan, fedavg, scaffold
from dpscaffold.flower import PrivateTraining, Strategy, client_app

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict  # isort: skip
from flwr.clientapp import ClientApp  # isort: skip
from flwr.supercore.task_identity import TaskIdentity  # isort: skip

from dpscaffold.deployment.protocol.messages import SignedMessage
from dpscaffold.deployment.site.work import OfferedWork
from dpscaffold.deployment.transports.flower.wire import from_records, to_records
from dpscaffold.flower.client import OwnModel, records_of
from dpscaffold.flower.kept import ClientAccount, KeptRun

RECORDS, FEATURES, CLASSES = 40, 5, 3


@pytest.fixture(autouse=True)
def in_a_task(monkeypatch):
    """Flower's messages name the task of the process that makes them."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, CLASSES))


def data_of(node, records=RECORDS):
    draw = torch.Generator().manual_seed(node)
    x = torch.randn(records, FEATURES, generator=draw)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


class Clients:
    """Flower's grid with ClientApps in this process, each with a folder of its own."""

    def __init__(self, folder, nodes=(11, 12), load=None, **changes):
        self.folder, self.away, self.seen = folder, set(), []
        load = load or (lambda context: data_of(context.node_id))
        given = {"shape": (FEATURES,), "epsilon": 1e5, "delta": 1e-5, "loss": "softmax"}
        self.training = PrivateTraining(net(), load, **(given | changes))
        self.apps = {node: client_app(self.training) for node in nodes}

    def get_node_ids(self):
        return list(self.apps)

    def context(self, node):
        return Context(1, node, {"state": str(self.folder / str(node))}, RecordDict(), {})

    def send_and_receive(self, messages, *, timeout=None):
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            answer = self.apps[node](message, self.context(node))
            self.seen.append((message, answer))
            if node not in self.away:
                replies.append(answer)
        return replies

    def lines(self, node):
        path = self.folder / str(node) / "ledger.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def participations(self, node):
        return sum("participate" in json.dumps(line) for line in self.lines(node))

    def ask(self, node, message):
        """The answer to one message, as a signed message's header and vectors."""
        return from_records(self.send_and_receive([message])[0].content)

    def repeat(self, node, number=-1, **changes):
        """Send an earlier message to a node once more, with other fields."""
        asked = [m for m, a in self.seen if m.metadata.dst_node_id == node and accepted(a)]
        sent = from_records(asked[number].content)
        header = {**sent.header, "heads": [], **changes}
        content = to_records(SignedMessage(header, sent.vectors))
        return self.ask(node, Message(content=content, dst_node_id=node, message_type="train"))


def accepted(answer):
    return from_records(answer.content).header["status"] == "yes"


def plan(**changes):
    given = {"rounds": 4, "local_steps": 2, "user_ratio": 1.0, "data_ratio": 1.0}
    return Plan(**given | {"learning_rate": 0.5} | changes)


def strategy(the_plan=None, privacy=None, algorithm=None, **changes):
    privacy = privacy or Gaussian(clip=0.3, noise=5.0)
    return Strategy(net(), the_plan or plan(), privacy, (FEATURES,), algorithm, **changes)


def clipped_mean(module, x, y, clip):
    """The mean clipped gradient by autograd, one record at a time."""
    total = 0.0
    for row, label in zip(x, y, strict=True):
        module.zero_grad()
        nn.functional.cross_entropy(module(row[None]), label[None]).backward()
        g = torch.cat([p.grad.flatten() for p in module.parameters()])
        total = total + g * min(1.0, clip / float(g.norm()))
    return total / len(x)


def set_params(module, flat):
    torch.nn.utils.vector_to_parameters(flat, module.parameters())


def by_hand(nodes, the_plan, clip):
    """SCAFFOLD of Algorithm 1 with full batches and without noise."""
    module = net()
    x = torch.nn.utils.parameters_to_vector(module.parameters()).detach().clone()
    c, own = torch.zeros_like(x), {node: torch.zeros_like(x) for node in nodes}
    eta, steps = the_plan.step_size_in(1), the_plan.local_steps
    for _ in range(the_plan.rounds):
        moves, changes = [], []
        for node in nodes:
            y = x.clone()
            for _ in range(steps):
                set_params(module, y.clone())
                gradient = clipped_mean(module, *data_of(node), clip)
                gradient = gradient + the_plan.regularisation * y
                y = y - eta * (gradient - own[node] + c)
            new = own[node] - c + (x - y) / (steps * eta)
            moves.append(y - x)
            changes.append(new - own[node])
            own[node] = new
        x = x + the_plan.server_rate * sum(moves) / len(nodes)
        c = c + sum(changes) / len(nodes)
    return x


def flat_of(result):
    return torch.cat([v.flatten() for v in result.arrays.to_torch_state_dict().values()])


def test_it_is_scaffold_on_ones_own_module(tmp_path):
    clients, small = Clients(tmp_path), Gaussian(clip=0.3, noise=0.05)
    result = strategy(privacy=small).start(clients)
    wanted, start = by_hand((11, 12), plan(), 0.3), flat_of_module(net())
    moved = float((wanted - start).norm())
    assert float((flat_of(result) - wanted).norm()) < 0.05 * moved
    assert moved > 0.1


def flat_of_module(module):
    return torch.cat([v.flatten() for v in module.state_dict().values()])


def gaussian_epsilon(mu, delta):
    """The exact ε of a Gaussian mechanism of this μ (Balle and Wang 2018), by bisection."""

    def cdf(t):
        return 0.5 * math.erfc(-t / math.sqrt(2))

    def at(e):
        return cdf(mu / 2 - e / mu) - math.exp(e) * cdf(-mu / 2 - e / mu)

    low, high = 0.0, 100.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle) > delta else (low, middle)
    return high


def test_the_stated_epsilon_is_that_of_all_steps(tmp_path):
    clients, made = Clients(tmp_path), strategy()
    result = made.start(clients)
    said = made.guarantee
    exact = gaussian_epsilon(math.sqrt(4 * 2) / 5.0, 1e-5)
    assert exact <= said.epsilon <= exact * 1.01
    assert said.participations == 4 and said.delta == 1e-5 and said.clients == 2
    assert said.granted > said.epsilon
    assert result.train_metrics_clientapp[4]["epsilon"] == said.epsilon
    assert [clients.participations(node) for node in (11, 12)] == [4, 4]
    for words in ("server", "replaced by another", "Not promised", "signed"):
        assert words in str(said)


def test_the_noise_is_there_and_is_the_clients_own(tmp_path):
    """Two equal runs differ by the noise that the plan says: 2C·σ/b on each step's gradient."""
    moves = []
    for name in ("a", "b"):
        one = plan(rounds=1, local_steps=1)
        result = strategy(one, Gaussian(clip=0.3, noise=5.0), fedavg()).start(
            Clients(tmp_path / name)
        )
        moves.append(flat_of(result))
    eta, spread = plan(local_steps=1).step_size_in(1), 2 * 0.3 * 5.0 / RECORDS
    wanted = eta * spread / math.sqrt(2) * math.sqrt(2)  # mean of two clients, difference of two
    found = float((moves[0] - moves[1]).std())
    assert 0.6 * wanted < found < 1.5 * wanted  # 39 parameters: 4 standard errors


def test_a_participation_is_counted_before_it_is_computed(tmp_path, monkeypatch):
    def breaks(*given):
        raise RuntimeError("patient 4711")

    clients, made = Clients(tmp_path), strategy(plan(rounds=1))
    monkeypatch.setattr(OfferedWork, "participate", breaks)
    made.start(clients)
    assert set(made.refused.values()) == {"site-error"}
    assert clients.participations(11) == 1
    assert made.guarantee.epsilon == made.guarantee.granted
    assert all(
        "patient" not in str(from_records(answer.content).header) for _, answer in clients.seen
    )


def test_own_functions_are_never_called(tmp_path):
    clients = Clients(tmp_path)
    app = ClientApp(mods=[clients.training])

    def own(message, context):
        raise AssertionError("called")

    for register in (app.train(), app.evaluate(), app.query()):
        register(own)
    clients.apps = dict.fromkeys((11, 12), app)
    strategy(plan(rounds=1)).start(clients)
    for kind in ("evaluate", "query"):
        message = clients.seen[-1][0]
        other = Message(content=message.content, dst_node_id=11, message_type=kind)
        with refuses("not-private: Strategy"):
            clients.send_and_receive([other])
    plain = RecordDict({"arrays": ArrayRecord([np.ones(3)]), "config": ConfigRecord({"lr": 1.0})})
    with refuses("not-private: nothing else"):
        clients.send_and_receive([Message(content=plain, dst_node_id=11, message_type="train")])


def test_a_run_has_one_budget_and_one_plan(tmp_path):
    clients = Clients(tmp_path, epsilon=3.0)
    strategy(plan(rounds=2)).start(clients)
    spent = clients.participations(11)
    assert clients.repeat(11).header["participations"] == spent  # the same question costs nothing
    header = clients.repeat(11).header
    assert header["status"] == "yes" and header["epsilon"] < 3.0
    offer = json.loads(json.dumps(header_of(clients, 11)["offer"]))
    offer["privacy"]["noise"] = 6.0
    assert clients.repeat(11, offer=offer).header["reason"] == "plan-changed"
    for value in (0.0, "x"):
        offer["privacy"]["noise"] = value
        assert clients.repeat(11, offer=offer).header["reason"] in ("policy-noise", "bad-offer")
    assert clients.repeat(11, round=3).header["reason"] == "bad-round"
    assert clients.repeat(11, run="00ff").header["reason"] == "unknown-run"
    assert clients.repeat(11, kind="settle").header["reason"] == "version"
    assert clients.participations(11) == spent
    with refuses("too-few-sites: policy-runs"):  # ε and δ are for one run
        strategy(plan(rounds=2)).start(clients)


def test_a_run_that_never_began_costs_nothing(tmp_path):
    """Grants are final with the first participation, as at a deployed site."""
    clients = Clients(tmp_path, epsilon=3.0)
    for _ in range(3):
        clients.apps[13] = client_app(replace(clients.training, epsilon=1e-6))
        with refuses("too-few-sites: 13: policy-epsilon"):
            strategy(plan(rounds=2), clients=3).start(clients)
    del clients.apps[13]
    strategy(plan(rounds=2)).start(clients)
    assert clients.participations(11) == 2
    said = (tmp_path / "11" / "client.log").read_text()
    assert "ε = 3" not in said and "took part 2 times" in said


def header_of(clients, node):
    sent = [message for message, _ in clients.seen if message.metadata.dst_node_id == node]
    return from_records(sent[-1].content).header


def test_a_hostile_server_gets_no_more_than_the_grant(tmp_path):
    clients = Clients(tmp_path, epsilon=3.0)
    strategy(plan(rounds=2)).start(clients)
    codes = []
    for scale in range(1, 9):
        message = [m for m, _ in clients.seen if m.metadata.dst_node_id == 11][-1]
        sent = from_records(message.content)
        vectors = {name: value + scale for name, value in sent.vectors.items()}
        vectors["restore.control"] = np.zeros_like(vectors["params"])
        header = {**sent.header, "nonce": f"{scale:04x}", "heads": []}
        again = Message(
            content=to_records(SignedMessage(header, vectors)),
            dst_node_id=11,
            message_type="train",
        )
        codes.append(clients.ask(11, again).header.get("reason", "yes"))
    grant = next(line for line in clients.lines(11) if "grant" in json.dumps(line))
    allowed = json.dumps(grant)
    assert codes[-1] == "budget-spent" and '"participations": 4' in allowed
    assert clients.participations(11) == 4


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"privacy": {"unit": "user", "sampling": "fixed"}}, "policy-unit"),
        ({"privacy": {"secret": False}}, "policy-unprotected"),
        ({"privacy": {"clip": "median"}}, "policy-clip"),
        ({"task": {"module": "os:getcwd"}}, "policy-model"),
        ({"task": {"loss": "logistic"}}, "policy-model"),
        ({"algorithm": {"name": "os:getcwd"}}, "policy-algorithm"),
        ({"plan": {"local_steps": 10**9}}, "policy-steps"),
        ({"plan": {"steps_by_user": [2, 1]}}, "policy-steps"),
    ],
)
def test_an_offer_without_a_guarantee_is_refused(tmp_path, changed, code):
    clients = Clients(tmp_path, epsilon=3.0)
    strategy(plan(rounds=2)).start(clients)
    offer = header_of(clients, 11)["offer"]
    for table, values in changed.items():
        offer = {**offer, table: {**offer[table], **values}}
    answer = clients.repeat(11, number=0, offer=offer, run="0f0f")
    assert answer.header == {"status": "no", "reason": code}
    assert sum("grant" in json.dumps(line) for line in clients.lines(11)) >= 1
    assert not (tmp_path / "11" / "runs" / "0f0f").exists()


def test_values_that_are_not_finite_are_refused(tmp_path):
    clients = Clients(tmp_path)
    strategy(plan(rounds=1)).start(clients)
    message = clients.seen[-1][0]
    sent = from_records(message.content)
    for value, code in ((np.nan, "not-finite"), (1e30, "out-of-range")):
        vectors = {**sent.vectors, "params": np.full_like(sent.vectors["params"], value)}
        content = to_records(SignedMessage({**sent.header, "heads": []}, vectors))
        node = message.metadata.dst_node_id
        again = Message(content=content, dst_node_id=node, message_type="train")
        assert clients.ask(node, again).header["reason"] == code


def test_the_ledger_cannot_go_back(tmp_path):
    clients, made = Clients(tmp_path), strategy(plan(rounds=3))
    kept = tmp_path / "kept"

    def after(number, arrays):
        if number == 1:
            shutil.copytree(tmp_path / "11", kept)
        if number == 2:
            shutil.rmtree(tmp_path / "11")
            shutil.copytree(kept, tmp_path / "11")

    made.start(clients, evaluate_fn=after)
    assert made.refused == {11: "ledger-behind"}
    assert clients.participations(11) == 1
    assert made.guarantee.epsilon == made.guarantee.granted


def test_records_may_not_change_their_number(tmp_path):
    sizes = iter([RECORDS] * 4 + [RECORDS - 1] * 4)
    clients = Clients(tmp_path, load=lambda context: data_of(1, next(sizes)))
    made = strategy(plan(rounds=2))
    made.start(clients)
    assert set(made.refused.values()) == {"data-changed"}


def test_an_absent_client_is_passed_over_and_comes_back(tmp_path):
    clients, made = Clients(tmp_path, nodes=(11, 12, 13)), strategy(plan(rounds=4))
    moved = []

    def after(number, arrays):
        clients.away = {12} if number == 1 else set()
        moved.append(arrays)

    made.start(clients, evaluate_fn=after)
    assert [clients.participations(node) for node in (11, 12, 13)] == [4, 4, 4]
    assert not made.refused
    # c is the mean of the clients' c_i, also after an upload was lost.
    run = made._run
    mean = run.memories.recall([0, 1, 2])["control"].mean(0)
    assert torch.allclose(mean, run.state.server.slots["control"], atol=1e-6)
    # Its second answer states both participations, so nothing is left to guess.
    assert made.guarantee.epsilon < made.guarantee.granted


def test_a_bad_upload_is_not_used(tmp_path):
    clients, made = Clients(tmp_path, nodes=(11, 12, 13)), strategy(plan(rounds=1))
    answered = clients.send_and_receive

    def twisted(messages, *, timeout=None):
        replies = answered(messages, timeout=timeout)
        for reply in replies:
            sent = from_records(reply.content)
            if sent.vectors and reply.metadata.src_node_id == 12:
                large = {name: value * 1000 for name, value in sent.vectors.items()}
                reply.content = to_records(SignedMessage(sent.header, large))
        return replies

    clients.send_and_receive = twisted
    result = made.start(clients)
    assert made.refused == {12: "bad-upload"}
    assert float(flat_of(result).abs().max()) < 5


def test_a_record_that_cannot_be_read_contributes_nothing():
    model = OwnModel(net(), (FEATURES,))

    class Untidy(Dataset):
        def __len__(self):
            return 7

        def __getitem__(self, place):
            x, y = data_of(1)[0][place], int(data_of(1)[1][place])
            if place == 1:
                raise OSError("cannot be decoded")
            broken = {2: (x[:3], y), 3: (x * math.nan, y), 4: (x, 3), 5: (x, math.nan), 6: (x, 0.5)}
            return broken.get(place, (x, y))

    held = records_of(Untidy(), model)
    assert held.used.tolist() == [True] + [False] * 6 and len(held) == 7
    assert not held.features[1:].any() and "6 of 7" in held.notes[0][0]
    pair = records_of(data_of(1), model)
    loader = records_of(DataLoader(TensorDataset(*data_of(1)), 8, shuffle=True), model)
    for one in (pair, loader):
        assert torch.equal(one.features, data_of(1)[0]) and torch.equal(one.labels, data_of(1)[1])
    number = records_of(
        ([[1.0]] * 2 and (np.ones((2, 3)), np.array([1.5, 1e20]))),
        OwnModel(nn.Linear(3, 1), (3,), "squared"),
    )
    assert number.used.tolist() == [True, False] and number.labels[0] == 1.5


class Chooses(nn.Linear):
    """A module whose steps depend on a record."""

    def forward(self, row):
        return super().forward(row if row.eq(0).all() else 2 * row)


def test_what_may_mix_records_is_refused(tmp_path):
    loader = DataLoader(TensorDataset(*data_of(1)), 8, collate_fn=lambda rows: rows)
    for given in (loader, iter(()), (np.ones((3, FEATURES)), np.ones(2))):
        clients = Clients(tmp_path / str(id(given)), load=lambda context, given=given: given)
        with refuses("too-few-sites: data-unfit"):
            strategy(plan(rounds=1)).start(clients)
    with refuses("not-per-record: depend on the values"):
        PrivateTraining(Chooses(FEATURES, CLASSES), data_of, (FEATURES,), epsilon=1, delta=1e-5)
    with refuses("not-per-record"):
        PrivateTraining(
            nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)), data_of, (5,), epsilon=1, delta=1e-5
        )


def test_bad_arguments_are_refused(tmp_path):
    good = {"shape": (FEATURES,), "epsilon": 1.0, "delta": 1e-5}
    for changes, code in (
        ({"epsilon": 0.0}, "out-of-range"),
        ({"runs": 0}, "out-of-range"),
        ({"delta": 1e-13}, "delta-too-small"),
        ({"loss": "labels"}, "unknown-choice"),
        ({"shape": ()}, "wrong-shape"),
    ):
        with refuses(code):
            PrivateTraining(net(), data_of, **(good | changes))
    with refuses("wrong-type: load"):
        PrivateTraining(net(), data_of(1), **good)
    for privacy in (None, Gaussian(1.0, 0.0), Gaussian(1.0, 5.0, unit="user")):
        with refuses("no-noise"):
            Strategy(net(), plan(), privacy, (FEATURES,))
    with refuses("unknown-algorithm"):
        strategy(algorithm=scaffold().replace(name="fedavg"))
    with refuses("not-applicable: plan.steps_by_user"):
        strategy(plan(steps_by_user=(2, 1)))
    with refuses("no-participants"):
        strategy(plan(user_ratio=0.2))
    with refuses("out-of-range: clients"):
        strategy(clients=0)
    made = strategy()
    with refuses("out-of-range: num_rounds"):
        made.start(Clients(tmp_path), num_rounds=5)
    with refuses("not-applicable: train_config"):
        made.start(Clients(tmp_path), train_config=ConfigRecord({"lr": 0.1}))
    with refuses("wrong-shape: initial_arrays"):
        made.start(Clients(tmp_path), ArrayRecord(nn.Linear(2, 2).state_dict()))
    with refuses("too-few-sites: raise wait"):
        strategy(clients=3, wait=0.0).start(Clients(tmp_path))
    assert made.guarantee is None
    with refuses("not-applicable: start"):
        made.aggregate_train(1, [])


def test_a_node_needs_a_folder(tmp_path):
    clients = Clients(tmp_path)
    clients.context = lambda node: Context(1, node, {}, RecordDict(), {})
    with refuses("missing-argument: --node-config"):
        strategy().start(clients)
    shared = replace(clients.training, state=tmp_path / "all")
    clients.apps = {node: client_app(shared) for node in (11, 12)}
    clients.context = lambda node: Context(1, node, {"partition-id": node}, RecordDict(), {})
    strategy(plan(rounds=1)).start(clients)
    assert (tmp_path / "all" / "11" / "ledger.jsonl").exists()


# --- a ServerApp that ended goes on


class Dies(BaseException):
    """The ServerApp is killed."""


class Killed(Clients):
    """Clients whose server dies at a call: before its messages leave, or with the answers."""

    def __init__(self, folder, call, answered):
        super().__init__(folder)
        self.calls, self.call, self.answered = 0, call, answered

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)  # Flower also sends empty lists, for evaluation
        self.calls += bool(messages)
        if messages and self.calls == self.call:
            if self.answered:
                super().send_and_receive(messages)
            raise Dies
        return super().send_and_receive(messages)


@pytest.mark.parametrize("answered", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("call", [2, 3, 5])
def test_a_server_that_died_goes_on_after_the_last_finished_round(tmp_path, call, answered):
    """Call 1 is the offer, call t + 1 is round t. No upload is drawn twice, no grant given twice,
    and the model is the one that the uploads of all rounds make."""
    clients, state = Killed(tmp_path, call, answered), tmp_path / "server"
    with pytest.raises(Dies):
        strategy(state=state).start(clients)
    clients.call, evaluated = 0, []
    again = strategy(state=state)
    result = again.start(clients, evaluate_fn=lambda round, arrays: evaluated.append(round))
    assert evaluated == list(range(call - 2, 5))
    assert list(result.train_metrics_clientapp) == list(range(call - 1, 5))
    for node in (11, 12):
        assert clients.participations(node) == 4
        assert sum(line.get("event") == "grant" for line in clients.lines(node)) == 1
    assert again.guarantee.participations == 4
    assert again.guarantee.epsilon < again.guarantee.granted
    exact = gaussian_epsilon(math.sqrt(4 * 2) / 5.0, 1e-5)
    assert exact <= again.guarantee.epsilon <= exact * 1.01
    assert torch.equal(flat_of(result), replayed(clients))


def replayed(clients):
    """SCAFFOLD's x from the distinct uploads that left the clients, by hand."""
    uploads = {}
    for _, answer in clients.seen:
        said = from_records(answer.content)
        if "upload" in said.header:
            uploads[said.header["round"], answer.metadata.src_node_id] = said.vectors["params"]
    x = torch.nn.utils.parameters_to_vector(net().parameters()).detach().clone()
    for round in range(1, 5):
        mean = torch.zeros_like(x)
        for node in (11, 12):
            mean += 0.5 * torch.from_numpy(uploads[round, node].copy())
        x = x + plan().server_rate * mean
    return x


def test_a_client_that_is_away_when_the_round_is_asked_again_counts_in_full(tmp_path):
    """Its answer was lost with the server, so that all of its grant may have been used."""
    clients, state = Killed(tmp_path, 5, True), tmp_path / "server"
    with pytest.raises(Dies):
        strategy(state=state).start(clients)
    clients.call, clients.away = 0, {12}
    again = strategy(state=state)
    again.start(clients)
    assert again.guarantee.epsilon == again.guarantee.granted


def test_a_run_goes_on_only_as_it_began(tmp_path):
    clients, state = Killed(tmp_path, 3, True), tmp_path / "server"
    with pytest.raises(Dies):
        strategy(state=state).start(clients)
    clients.call = 0
    with refuses("configuration-changed: another plan"):
        strategy(plan(learning_rate=0.4), state=state).start(clients)
    gone = Clients(tmp_path / "new", nodes=(21, 22))
    with refuses("too-few-sites: 0 of the 2 clients … new run"):
        strategy(state=state, wait=0.0).start(gone)
    assert not gone.seen  # nobody was asked for a grant
    with KeptRun(state, "").locked(), refuses("folder-in-use"):
        strategy(state=state).start(clients)
    saved = (state / "run.pt").read_bytes()
    (state / "run.pt").write_bytes(saved[: len(saved) // 2])
    with refuses("checkpoint-damaged: new run"):
        strategy(state=state).start(clients)
    (state / "run.pt").write_bytes(saved)
    strategy(state=state).start(clients)
    with refuses("run-exists: 4 rounds done … num_rounds is 3"):
        strategy(state=state).start(clients, num_rounds=3)
    assert clients.participations(11) == 4


def test_what_fails_inside_a_run_is_not_taken_for_a_folder_in_use(tmp_path):
    def breaks(messages, *, timeout=None):
        raise BlockingIOError("a pipe is full")

    clients = Clients(tmp_path)
    clients.send_and_receive = breaks
    with pytest.raises(BlockingIOError, match="a pipe is full"):
        strategy(state=tmp_path / "server").start(clients)


@pytest.mark.parametrize("rounds", [2, 4], ids=["some", "all"])
def test_a_finished_run_gives_its_model_again_and_asks_nobody(tmp_path, rounds):
    """Its ServerApp may have been killed before it stored the model."""
    clients, state, evaluated = Clients(tmp_path), tmp_path / "server", []
    first = strategy(plan(), state=state).start(clients, num_rounds=rounds)
    seen = len(clients.seen)
    made = strategy(plan(), state=state)
    again = made.start(
        clients, num_rounds=rounds, evaluate_fn=lambda round, arrays: evaluated.append(round)
    )
    assert torch.equal(flat_of(again), flat_of(first))
    assert evaluated == [rounds] and len(clients.seen) == seen
    # Nobody was asked, so nobody knows what the clients have spent since.
    assert made.guarantee.epsilon == made.guarantee.granted and made.guarantee.clients == 2


# --- an older file is put back


class Some(Clients):
    """Clients of whom some are gone."""

    gone: frozenset[int] = frozenset()

    def get_node_ids(self):
        return [node for node in self.apps if node not in self.gone]

    def send_and_receive(self, messages, *, timeout=None):
        there = [one for one in messages if one.metadata.dst_node_id not in self.gone]
        return super().send_and_receive(there)


def put_back(folder, back, algorithm=None, **changes):
    """A run of which nine rounds are done, and whose file is that of an earlier round."""
    clients, state = Some(folder, nodes=(11, 12, 13)), folder / "server"

    def made():
        given = {"rounds": 12, "user_ratio": 0.5} | changes
        return strategy(plan(**given), None, algorithm, state=state, clients=2)

    made().start(clients, num_rounds=back)
    older = (state / "run.pt").read_bytes()
    made().start(clients, num_rounds=9)
    (state / "run.pt").write_bytes(older)
    return clients, made


def spent_by(clients):
    """ε of the client that took part most often, by its own ledger and a closed form."""
    most = max(clients.participations(node) for node in clients.apps)
    return gaussian_epsilon(math.sqrt(most * 2) / 5.0, 1e-5)


@pytest.mark.parametrize(("back", "seed"), [(3, 2), (3, 3), (1, 1)])
def test_an_older_file_states_all_that_clients_have_spent(tmp_path, back, seed):
    clients, made = put_back(tmp_path, back, seed=seed)
    for last in range(back + 1, 7):
        again = made()
        again.start(clients, num_rounds=last)
        assert again.guarantee.epsilon >= spent_by(clients)
    # All have said it themselves, and none has granted anything new.
    assert max(one.epsilon for one in again._accounts.values()) <= spent_by(clients) * 1.01
    for node in clients.apps:
        assert sum(line.get("event") == "grant" for line in clients.lines(node)) == 1


def test_a_client_that_has_not_answered_since_counts_in_full(tmp_path):
    """In the file that was put back nobody had asked it, and afterwards it took part."""
    clients, made = put_back(tmp_path, 1, fedavg(), seed=3)
    assert clients.participations(13) > 0
    clients.gone, again = {13}, made()
    again.start(clients, num_rounds=2)
    others = [one.worst for node, one in again._accounts.items() if node != 13]
    assert again._accounts[13].asked == 0 and max(others) < again.guarantee.granted
    assert again.guarantee.epsilon == again.guarantee.granted
    clients.gone, again = frozenset(), made()
    again.start(clients, num_rounds=3)
    assert again._accounts[13].epsilon >= gaussian_epsilon(math.sqrt(2) / 5.0, 1e-5)


def test_a_client_that_comes_late_is_asked_then(tmp_path):
    clients, made = put_back(tmp_path, 1, seed=1)
    clients.gone, again = {12}, made()
    stated = []

    def after(number, arrays):
        stated.append(again._accounts[12].heard)
        clients.gone = frozenset() if number >= 2 else {12}

    again.start(clients, num_rounds=4, evaluate_fn=after)
    assert stated == [False, False, True, True]


def test_an_offer_of_a_known_run_costs_nothing_and_says_what_it_has_cost(tmp_path):
    clients = Clients(tmp_path)
    strategy(plan(rounds=2)).start(clients)
    before = clients.lines(11)
    said = clients.repeat(11, number=0).header
    exact = gaussian_epsilon(math.sqrt(2 * 2) / 5.0, 1e-5)
    assert said["participations"] == 2 and exact <= said["epsilon"] <= exact * 1.01
    assert clients.lines(11) == before


def test_a_client_whose_memory_differs_is_still_restored_after_it_was_asked(tmp_path):
    clients, made = put_back(tmp_path, 1, user_ratio=1.0)
    again = made()
    again.start(clients, num_rounds=2)
    assert set(again.refused.values()) == {"state-mismatch"}
    again = made()
    again.start(clients, num_rounds=3)
    assert not again.refused


def test_an_account_never_counts_less_than_may_have_left():
    one = ClientAccount(granted=9.0, delta=1e-5)
    one.ask(1)
    one.answer(1.0, 1)
    one.ask(2)  # the server is killed, and asks another question for the same round
    one.ask(2)
    one.answer(3.0, 3)
    assert one.worst == 3.0
    one.ask(3)  # this answer is lost
    assert one.worst == 9.0
    # A round is asked again although all that was asked is counted: the client may repeat its
    # answer, or draw a new one.
    for count, stated in ((2, 2.0), (3, 3.0)):
        one = ClientAccount(granted=9.0, delta=1e-5, asked=2, participations=1, last_round=2)
        one.heard = False
        assert one.worst == 9.0
        one.hear(2.0, 2)
        assert one.worst == 2.0
        one.ask(2)
        assert one.worst == 9.0
        one.ask(2)
        assert one.worst == 9.0
        one.answer(stated, count)
        assert one.worst == stated
        one.ask(3)
        one.answer(4.0, count + 1)
        assert one.worst == 4.0
    one.hear(1.0, 1)  # it never becomes less
    assert (one.epsilon, one.participations) == (4.0, 4)


@pytest.mark.parametrize("order", [1, -1])
def test_the_delta_is_that_of_the_client_with_the_largest(order):
    """Clients choose their own δ: what is stated of all must hold for each of them."""
    made = strategy()
    accounts = [ClientAccount(2.0, 1e-5, asked=1), ClientAccount(3.0, 1e-7, asked=1)]
    made._accounts = dict(enumerate(accounts[::order]))
    assert (made.guarantee.delta, made.guarantee.epsilon) == (1e-5, 3.0)
