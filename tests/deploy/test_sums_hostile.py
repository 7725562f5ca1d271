"""A hostile server against secure sums, with colluding sites at hand: every attack that is known,
and what the sites answer."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
from deploy.sums import SECRET, SumWorld
from refusals import refuses
from stated import at_most

from dpscaffold.config.secure import Secure
from dpscaffold.deployment.protocol.enrolment import EnrolledRun, NotEnrolled, members_in, offer_to
from dpscaffold.deployment.protocol.masks import EpochKey, announce
from dpscaffold.deployment.protocol.messages import (
    SERVER,
    ask,
    commitment,
    digest,
    fingerprint,
    fresh_id,
    new_key,
    public_of,
)
from dpscaffold.deployment.site.ledger import RecoveryEntry
from dpscaffold.privacy import describe


@pytest.fixture
def world(tmp_path):
    made = SumWorld(tmp_path, privacy=SECRET)
    made.enrol()
    return made


def hidden(world, words) -> bool:
    """Whether a sum is still masked: its numbers are spread over the whole range."""
    found = world.total(words)
    return bool((abs(found.astype(float)) > 2 ** (world.engine.sums.grid.bits - 8)).mean() > 0.8)


def session(world, run=None, plan=None):
    return members_in(world.post, world.enrolled).session(
        run or world.enrolled.run, plan or world.enrolled.plan
    )


# --- inconsistent lists


def test_members_that_were_given_different_lists_share_no_mask(world):
    keys = world.keys_of()
    words = [world.words("east", keys[:3]), world.words("north", keys)]
    words += [world.words("south", keys[:3]), world.words("west", keys)]
    for some in (words, words[:2], words[::2], words[1::2]):
        assert hidden(world, some)


def test_members_that_were_given_different_attempts_or_models_share_no_mask(world):
    keys = world.keys_of()
    other = {"params": world.state.params.numpy() + 1}
    words = [world.words("east", keys, attempt=2), world.words("north", keys)]
    words += [world.words("south", keys), world.words("west", keys, vectors=other)]
    assert hidden(world, words)


def test_a_list_is_part_of_the_draw(tmp_path):
    world = SumWorld(tmp_path, privacy=SECRET, user_ratio=0.75)
    world.enrol()
    drawn = [world.names[user] for user in world.draw(1).drawn]
    (left,) = set(world.names) - set(drawn)
    keys = world.keys_of()
    by_name = {key.name: key for key in keys}
    assert world.no(drawn[0], keys) == "bad-list"
    swapped = [by_name[name] for name in (drawn[0], drawn[1], left)]
    assert world.no(drawn[0], swapped) == "bad-list"
    assert world.no(left, keys) == "not-drawn"


def test_a_list_names_its_own_site_and_nobody_twice(world):
    keys = world.keys_of()
    assert world.no("east", keys[1:]) == "bad-list"
    assert world.no("east", [*keys, keys[1]]) == "bad-list"


@pytest.mark.parametrize("members", [0, 1, 2])
def test_a_list_is_not_too_short(world, members):
    keys = world.keys_of()
    assert world.no("east", keys[:members]) == "bad-list"


def test_the_site_decides_on_the_shortest_list_too(world):
    world.confirm("east", least=4)
    keys = world.keys_of()
    assert world.no("east", keys[:3]) == "bad-list"
    world.words("east", keys)


def test_a_policy_that_was_relaxed_does_not_shorten_the_lists_of_a_run(tmp_path):
    """The noise was granted for lists of four or more."""
    world = SumWorld(tmp_path, privacy=SECRET, site={"least": 4})
    world.enrol()
    world.confirm(least=3)
    assert world.no("east", world.keys_of()[:3]) == "bad-list"


# --- claimed drop-outs


def test_claimed_drop_outs_show_no_single_upload(tmp_path):
    """The server has everybody's upload, says that south is gone, and subtracts the two sums."""
    world = SumWorld(tmp_path, privacy=SECRET)
    world.enrol()
    taken = tapped(world)
    keys = world.keys_of()
    whole = world.total([world.words(name, keys) for name in world.names])
    left = [key for key in keys if key.name != "south"]
    rest = world.total([world.words(key.name, left, attempt=2) for key in left])
    assert ((whole - rest) != south_alone(world, taken)).mean() > 0.8
    for name in ("east", "north", "west"):  # no noise was used twice
        assert (taken[name][0] != taken[name][1]).mean() > 0.8
    assert [world.count(name) for name in world.names] == [2, 2, 1, 2]


def tapped(world):
    """The integers of every site before they are masked, attempt after attempt."""
    taken = {name: [] for name in world.names}
    for name, site in world.sites.items():
        work = site._works[world.enrolled.run]

        def integers(*given, real=work.integers, kept=taken[name]):
            kept.append(real(*given))
            return kept[-1]

        object.__setattr__(work, "integers", integers)
    return taken


def south_alone(world, taken):
    return world.engine.sums.grid.integers(taken["south"][0]).numpy()


def test_every_attempt_counts_until_the_cap(tmp_path):
    world = SumWorld(tmp_path, privacy=SECRET, rounds=2, site={"voids": 100})
    world.enrol()
    cap = world.ledger("east").runs[world.enrolled.run].grant.participations
    assert cap == 2 + 10
    keys, said = world.keys_of(), ""
    for attempt in range(1, 20):
        said = world.reason("east", world.sum_task("east", keys, attempt))
        if said:
            break
    assert (said, world.count("east")) == ("voids-spent", 11)  # the plan has 10 voids
    world.words("east", keys, number=2)
    assert world.no("east", keys, attempt=2, number=2) in ("voids-spent", "budget-spent")
    assert world.count("east") == cap


def test_more_voids_than_the_policy_permits_are_refused(tmp_path):
    world = SumWorld(tmp_path, privacy=SECRET, site={"voids": 1})
    world.enrol()
    keys = world.keys_of()
    world.words("east", keys, attempt=1)
    world.words("east", keys, attempt=2)
    assert world.no("east", keys, attempt=3) == "voids-spent"
    world.words("east", keys, number=2)  # a new round repeats nothing
    assert world.no("east", keys, number=2, attempt=2) == "voids-spent"


# --- two values under one label


def test_a_label_has_one_value(world):
    keys = world.keys_of()
    first = world.words("east", keys)
    assert (world.words("east", keys) == first).all()  # the same question again
    assert world.count("east") == 1
    other = {"params": world.state.params.numpy() + 1}
    assert world.no("east", keys, vectors=other) == "attempt-used"
    assert world.no("east", keys[:3]) == "attempt-used"


def test_attempts_grow(world):
    keys = world.keys_of()
    world.words("east", keys, attempt=3)
    for attempt in (1, 2):
        assert world.no("east", keys, attempt=attempt) == "attempt-used"
    for attempt in (0, -1, 1.5, True, "1", None, 2**53):
        assert world.no("east", keys, attempt) == "attempt-used"
    world.words("east", keys, number=2, attempt=1)
    assert world.no("east", keys, number=1, attempt=4) == "stale-round"


def test_a_ledger_line_without_an_upload_burns_the_label(world):
    keys = world.keys_of()
    world.words("east", keys)
    (world.memory("east").folder / "pending.box").unlink()
    assert world.no("east", keys) == "attempt-used"
    world.words("east", keys, attempt=2)


# --- clones, backups and restarts


def test_a_restart_has_another_key_and_repeats_only_what_was_stored(world):
    keys = world.keys_of()
    first = world.words("east", keys)
    world.restart("east")
    assert (world.words("east", keys) == first).all()
    assert world.no("east", keys, attempt=2) == "stale-key"
    assert world.key_of("east").epoch != keys[0].epoch


def test_a_clone_adds_nothing_that_cancels(world, tmp_path):
    """Two copies of south answer the same attempt. The others know one key of south's, so the
    copy's value stays masked, alone and in every sum."""
    keys = world.keys_of()
    world.close("south")
    shutil.copytree(tmp_path / "south" / "state", tmp_path / "copy")
    original = world.open("south", tmp_path / "south" / "state")
    mine = world.keys_of()
    words = {name: world.words(name, mine) for name in world.names}
    world.open("south", tmp_path / "copy")
    assert world.reason("south", world.sum_task("south", mine)) == "stale-key"
    copied = (*mine[:2], world.key_of("south"), mine[3])
    other = world.words("south", copied)
    assert hidden(world, [other]) and hidden(world, [other - words["south"]])
    assert hidden(world, [words["east"], words["north"], other, words["west"]])
    assert keys != mine
    world.sites["south"] = original


# --- keys


def test_a_colluder_that_copies_a_key_is_refused(world):
    """West signs north's key as its own, so that the masks of east would cancel."""
    keys = world.keys_of()
    copied = EpochKey("another epoch", EpochKey.fresh().private)
    object.__setattr__(
        copied, "private", world.sites["north"]._rings[world.enrolled.run].key.private
    )
    thief = announce(session(world), "west", copied, world.keys["west"])
    assert thief.key == keys[1].key
    assert world.no("east", [*keys[:3], thief]) == "bad-keys"
    assert world.no("north", [keys[1], *keys[2:3], thief]) == "bad-keys"


@pytest.mark.parametrize("point", ["00" * 32, "01" + "00" * 31])
def test_a_colluder_with_a_weak_key_is_refused(world, point):
    class Weak(EpochKey):
        public = point

    weak = announce(session(world), "west", Weak("e", EpochKey.fresh().private), world.keys["west"])
    assert world.no("east", [*world.keys_of()[:3], weak]) == "bad-keys"


def test_a_key_that_its_member_did_not_sign_is_refused(world):
    keys = world.keys_of()
    forged = announce(session(world), "west", EpochKey.fresh(), world.key)
    for bad in (forged, replace(keys[3], epoch="other"), replace(keys[3], signature="00")):
        assert world.no("east", [*keys[:3], bad]) == "bad-keys"
    for bad in (None, "key", {"name": "west"}, 7):
        sent = [vars(key) for key in keys[:3]] + [bad]
        assert world.no("east", keys, keys=sent) == "bad-keys"
    assert world.no("east", keys, keys="all") == "bad-keys"


# --- a weaker plan for another site, other sizes, other runs


def test_a_site_with_a_weaker_plan_has_keys_that_nobody_takes(world):
    keys = world.keys_of()
    weaker = announce(session(world, plan="weaker"), "west", EpochKey.fresh(), world.keys["west"])
    assert world.no("east", [*keys[:3], weaker]) == "bad-keys"
    head = {"plan": "weaker", "seen": 0, "seen_total": 0}
    asked = ask("key", world.enrolled.run, "west", head, {}, world.key)
    assert world.reason("west", asked) == "plan-changed"
    assert world.no("east", keys, plan="weaker") == "plan-changed"


def test_members_that_were_told_other_sizes_take_no_keys_of_each_other(world):
    """With other sizes the noise of the others would look larger than it is."""
    told = members_in(world.post, replace(world.enrolled, sizes=(9, 1, 1, 1)))
    other = told.session(world.enrolled.run, world.enrolled.plan)
    lied = announce(other, "east", EpochKey.fresh(), world.keys["east"])
    assert world.no("north", [lied, *world.keys_of()[1:]]) == "bad-keys"


def test_keys_of_another_run_are_refused(tmp_path):
    world = SumWorld(tmp_path, privacy=SECRET)
    world.enrol()
    old = world.keys_of()
    world.words("east", old)
    world.fresh_server()
    world.enrol()
    assert world.no("east", old) == "stale-key"
    assert world.no("east", [world.key_of("east"), *old[1:]]) == "bad-keys"


# --- the roster


def offered(world, names=None, publics=None, sizes=None, offer=None):
    """What east says to an offer with another roster."""
    names = list(names or world.names)
    known = {name: public_of(key) for name, key in world.keys.items()}
    fields = {
        "offer": dict(offer or world.enrolled.offer),
        "commitment": commitment("00", SERVER, "nonce"),
        "roster": names,
        "publics": {name: (publics or {}).get(name, known.get(name, "")) for name in names},
        "sizes": list(sizes or world.enrolled.sizes[: len(names)]),
        "seen": 0,
        "seen_total": 0,
    }
    fields = {key: value for key, value in fields.items() if value is not None}
    before = (world.folder / "east" / "state" / "ledger.jsonl").read_bytes()
    said = world.reason("east", ask("offer", fresh_id(), "east", fields, {}, world.key))
    if said:
        assert (world.folder / "east" / "state" / "ledger.jsonl").read_bytes() == before
    return said


def test_a_sybil_roster_is_refused(world):
    """East, and three sites that the server invented: it would read east's upload."""
    invented = {name: public_of(new_key()) for name in ("one", "two", "three")}
    assert offered(world, ("east", *invented), invented) == "policy-members"


def test_as_many_unconfirmed_members_as_may_collude_are_accepted(world):
    invented = {"one": public_of(new_key())}
    assert offered(world, ("east", "north", "south", "one"), invented) == ""
    more = invented | {"two": public_of(new_key())}
    assert offered(world, ("east", "north", "one", "two"), more) == "policy-members"


def test_a_member_with_another_key_is_refused(world):
    assert offered(world, publics={"south": public_of(new_key())}) == "member-changed"


def test_the_site_itself_is_a_member_with_its_own_key(world):
    assert offered(world, publics={"east": public_of(new_key())}) == "roster-changed"
    assert offered(world, ("north", "south", "west")) == "roster-changed"


@pytest.mark.parametrize(
    "publics",
    [
        {"south": "no key"},
        {"south": "ed25519:00"},
        {"south": None},
        {"south": "north"},
    ],
    ids=repr,
)
def test_every_member_has_a_key_of_its_own(world, publics):
    publics = {k: public_of(world.keys["north"]) if v == "north" else v for k, v in publics.items()}
    assert offered(world, publics=publics) == "roster-changed"


def test_one_honest_site_is_not_enough(tmp_path):
    """A list of two with one colluder shows the honest site's upload."""
    world = SumWorld(tmp_path, privacy=SECRET)
    world.enrol()
    offer = {**world.enrolled.offer, "secure": {"colluders": 1, "least": 2, "voids": 0}}
    assert offered(world, offer=offer) == "bad-offer"
    offer["secure"]["least"] = None
    assert offered(world, ("east", "north"), offer=offer) == "policy-secure"


def test_a_site_is_expected_with_its_own_size(world):
    assert offered(world, sizes=(8, 12, 7, 10)) == "data-changed"


def test_a_run_begins_with_the_members_that_were_offered(world):
    run = fresh_id()
    enrolled = replace(world.enrolled, run=run, commitments={}, nonces={})
    enrolled = offer_to(world.post, enrolled)
    names = enrolled.names[:3]
    head = {
        "roster": list(names),
        "sizes": list(enrolled.sizes[:3]),
        "commitments": {k: v for k, v in enrolled.commitments.items() if k != "west"},
        "seen": 0,
        "seen_total": 0,
    }
    assert world.reason("east", ask("begin", run, "east", head, {}, world.key)) == "roster-changed"


# --- what a policy wants


def test_a_site_without_a_secure_table_takes_part_in_no_sum(world):
    world.policies["east"] = world.policies["east"].with_secure(None)
    assert offered(world) == "policy-secure"
    assert world.no("east", world.keys_of(("north", "south", "west"))) == "policy-secure"


def test_a_site_that_wants_secure_sums_takes_part_in_nothing_else(world):
    plain = {key: value for key, value in world.enrolled.offer.items() if key != "secure"}
    assert offered(world, offer=plain) == ""
    world.confirm("east", required=True)
    assert offered(world, offer=plain) == "policy-secure"
    assert offered(world) == ""


def test_a_plan_with_fewer_colluders_than_the_site_fears_is_refused(world):
    world.confirm("east", colluders=2, least=4)
    assert offered(world) == "policy-secure"


def test_a_plan_with_fewer_participants_than_the_site_wants_is_refused(world):
    world.confirm("east", least=5)
    assert offered(world) == "policy-secure"


def test_more_than_one_local_step_is_refused(world):
    offer = {**world.enrolled.offer, "plan": {**world.enrolled.offer["plan"], "local_steps": 2}}
    assert offered(world, offer=offer) == "policy-steps"


def test_an_algorithm_with_a_memory_is_refused(world):
    offer = {**world.enrolled.offer, "algorithm": {"name": "scaffold"}}
    assert offered(world, offer=offer) == "policy-algorithm"


# --- the account


def epsilon(noise, participations, records, batch, delta):
    """ε of a user in n sampled Gaussians of this multiplier, by the bound that the site uses."""
    run = describe(
        rounds=participations, local_steps=1, users=1, cohort_size=1, records=records,
        batch_sizes=batch, noise=noise, clip=0.7, sampling="poisson", delta=delta,
        declared_sizes=True,
    )  # fmt: skip
    return at_most(run)


def test_a_grant_covers_all_attempts_towards_both_adversaries(tmp_path):
    world = SumWorld(tmp_path, privacy=SECRET, sizes=(9, 9, 9, 9))
    world.enrol()
    reserved = world.ledger("east").runs[world.enrolled.run]
    assert reserved.grant.participations == 3 + 10
    batch = reserved.account["batch"]
    towards = [epsilon(noise, 13, 9, batch, 1e-3) for noise in (20 * 3**0.5, 20)]
    assert reserved.grant.epsilon == pytest.approx(towards[0], rel=1e-6)
    assert reserved.grant.epsilon_alone == pytest.approx(towards[1], rel=1e-6)
    assert reserved.grant.epsilon < reserved.grant.epsilon_alone


def test_a_small_site_counts_only_the_noise_that_is_there(tmp_path):
    """A site with few records has a large sensitivity; the others' noise hides less of it."""
    noises = {}
    world = SumWorld(tmp_path, privacy=SECRET, sizes=(4, 40, 40, 40))
    world.enrol()
    for name in world.names:
        noises[name] = world.ledger(name).runs[world.enrolled.run].account["sums"]["noise"]
    assert 20 < noises["east"] < 20.4  # hardly more than its own
    assert noises["north"] == pytest.approx(20 * 3**0.5, rel=1e-6)


def test_the_cap_of_epsilon_alone_holds(tmp_path):
    world = SumWorld(tmp_path, privacy=SECRET)
    world.confirm(epsilon_alone=0.1)  # a tenth for each run
    with pytest.raises(NotEnrolled) as no:
        world.enrol()
    assert set(no.value.reasons.values()) == {"policy-epsilon"}
    world.confirm(epsilon_alone=1e3)
    world.enrol()
    granted = world.ledger("east").runs[world.enrolled.run].grant
    assert granted.epsilon_alone <= 100
    world.confirm("east", epsilon_alone=granted.epsilon_alone / 2)
    keys, attempt = world.keys_of(), 0
    while not world.reason("east", world.sum_task("east", keys, attempt := attempt + 1)):
        continue
    assert world.no("east", keys, attempt) == "budget-spent"
    assert world.count("east") < granted.participations


def test_runs_without_secure_sums_count_towards_epsilon_alone(world):
    ledger = world.ledger("east")
    policy = world.policies["east"]
    reserved = ledger.runs[world.enrolled.run].grant
    assert 1e6 - ledger.left(policy).alone == pytest.approx(reserved.epsilon_alone)
    plain = {key: value for key, value in world.enrolled.offer.items() if key != "secure"}
    assert offered(world, offer=plain) == ""
    ledger = world.ledger("east")
    more = [b.grant.epsilon for b in ledger.runs.values() if b.grant.epsilon_alone is None]
    assert 1e6 - ledger.left(policy).alone == pytest.approx(reserved.epsilon_alone + sum(more))


def test_what_a_lost_folder_may_have_spent_counts_towards_epsilon_alone(world):
    """By its own number where a recovery states one, by its ε towards the server otherwise."""
    ledger, policy = world.ledger("east"), world.policies["east"]
    before = ledger.left(policy).alone  # about 10⁶: differences are compared, not what is left
    ledger.recover([], RecoveryEntry(2, 0.25, 1e-7, "", 0.75))
    assert before - ledger.left(policy).alone == pytest.approx(0.75)
    ledger.recover([], RecoveryEntry(2, 0.5, 1e-7, ""))
    assert before - world.ledger("east").left(policy).alone == pytest.approx(0.75 + 0.5)


def test_a_fingerprint_that_is_withdrawn_in_the_middle_of_a_run_counts_no_more(world):
    """Whom the site's people no longer trust hides nobody: the next attempt is refused, before
    anything is counted."""
    keys = world.keys_of()
    assert world.reason("east", world.sum_task("east", keys, 1)) == ""
    counted = world.count("east")
    prints = {name: fingerprint(public_of(key)) for name, key in world.keys.items()}
    world.confirm("east", members={name: prints[name] for name in ("east", "north")})
    assert world.reason("east", world.sum_task("east", keys, 2)) == "policy-members"
    world.confirm("east", members=prints | {"south": fingerprint(public_of(new_key()))})
    assert world.reason("east", world.sum_task("east", keys, 2)) == "member-changed"
    assert world.count("east") == counted
    world.confirm("east")
    assert world.reason("east", world.sum_task("east", keys, 2)) == ""


# --- a hostile site


def test_a_hostile_site_can_set_the_sum_and_nothing_more(world):
    """Whatever west sends, the result is finite and within the range of the integers: the mean
    moves by at most step·2^(w−1)/|A| in a coordinate."""
    sums = world.engine.sums
    real = world.sites["west"]._masked

    def huge(*given):
        vector = real(*given)["sum"]
        return {"sum": np.full_like(vector, np.nan)}

    world.sites["west"]._masked = huge
    before = world.state.params.numpy().copy()
    done = world.round()
    assert len(done.arrived) == 4
    largest = sums.grid.step * 2.0 ** (sums.grid.bits - 1) / 4
    moved = np.abs(world.state.params.numpy() - before)
    assert np.isfinite(moved).all()
    rate = world.setting.plan.step_size_in(1) * world.setting.plan.server_rate
    assert moved.max() <= largest * rate * 1.001 + 1e-6


def test_a_site_cannot_send_another_shape(world):
    real = world.sites["west"]._masked

    def short(*given):
        return {"sum": real(*given)["sum"][:-1]}

    world.sites["west"]._masked = short
    done = world.round()
    assert len(done.arrived) == 3 and world.engine.last.voids == 1


# --- the start of a run


def test_a_secure_run_needs_all_sizes(tmp_path):
    world = SumWorld(tmp_path, privacy=SECRET)
    for records in (None, {}, {"east": 9}, {**world.sizes, "more": 3}):
        with refuses("sites-differ: deploy.records … east"):
            EnrolledRun.fresh(world.enrolled.offer, world.names, records)


def test_an_offer_without_secure_sums_is_as_it_was(world):
    plain = {key: value for key, value in world.enrolled.offer.items() if key != "secure"}
    assert "secure" in world.enrolled.offer and digest(plain) != world.enrolled.plan


def test_fingerprints_are_those_of_the_signing_keys():
    key = "ed25519:" + 64 * "0"
    assert fingerprint(key) == "2414-be14-a0ea-7ff3-1e76-35f9-0995-4303"
    assert len({fingerprint(public_of(new_key())) for _ in range(50)}) == 50


def test_a_plans_least_is_kept(tmp_path):
    world = SumWorld(tmp_path, privacy=SECRET, secure=Secure(1, 4, 5), site={"least": 3})
    world.enrol()
    assert world.no("east", world.keys_of()[:3]) == "bad-list"
