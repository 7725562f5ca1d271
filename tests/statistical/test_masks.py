"""Masked uploads look uniform to whoever lacks the keys of two honest members.

Every group of four bits gets a chi-square test: of one site's uploads less the masks that it shares
with colluders, of differences of two of its uploads, and of the sum of all honest uploads but one.
What lies under the masks are small integers, as in a secure sum. A test fails by chance once in a
million runs; keys come from a seed, so that it passes or fails for good.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from scipy.stats import chi2

from dpscaffold.deployment.protocol.masks import EpochKey, agreement_digest
from dpscaffold.deployment.protocol.messages import public_of
from dpscaffold.deployment.protocol.sums import Attempt, Members
from dpscaffold.deployment.site import secure as site_module
from dpscaffold.deployment.site.secure import KeyRing

ALARM = 1e-6
MEMBERS, ROUNDS, ATTEMPTS, NUMBERS = 5, 2, 20, 60
MODEL = b"the model"
PROPER = site_module.mask


@dataclass(frozen=True)
class MaskedList:
    """The members of a list with their keys, the honest ones first."""

    rings: tuple[KeyRing, ...]
    signers: tuple[Ed25519PrivateKey, ...]
    honest: int

    @classmethod
    def of(cls, colluders: int, rng: np.random.Generator) -> MaskedList:
        names = tuple(f"site{place}" for place in range(MEMBERS))
        signers = tuple(Ed25519PrivateKey.from_private_bytes(rng.bytes(32)) for _ in names)
        publics = {name: public_of(key) for name, key in zip(names, signers, strict=True)}
        listed = Members(names, (1,) * MEMBERS, publics)
        session = listed.session(rng.bytes(16).hex(), "plan")
        rings = tuple(
            KeyRing(
                name,
                session,
                listed,
                EpochKey(rng.bytes(16).hex(), X25519PrivateKey.from_private_bytes(rng.bytes(32))),
            )
            for name in names
        )
        return cls(rings, signers, MEMBERS - colluders)

    def attempt(self, number: int) -> Attempt:
        pairs = zip(self.rings, self.signers, strict=True)
        return Attempt(number, tuple(ring.announced(signer) for ring, signer in pairs))

    def masked(self, words: np.ndarray, attempt: Attempt, round: int) -> np.ndarray:
        """What arrives at the server: words (members, P) under their masks."""
        bits = 32 if words.dtype.itemsize == 4 else 64
        masks = [ring.mask(attempt, round, MODEL, words.shape[1], bits) for ring in self.rings]
        return words + np.stack(masks)

    def bare(self, uploads: np.ndarray, place: int, attempt: Attempt, round: int) -> np.ndarray:
        """The upload of one honest member, less the masks that it shares with colluders."""
        known = {ring.name for ring in self.rings[self.honest :]}
        ring, bits = self.rings[place], 32 if uploads.dtype.itemsize == 4 else 64
        pairs = {name: pair for name, pair in ring.pairs(attempt).items() if name in known}
        agreed = agreement_digest({key.name: key.epoch for key in attempt.keys}, MODEL)
        shared = site_module.mask(
            pairs, ring.name, round, attempt.number, agreed, uploads.shape[1], bits
        )
        return np.asarray(uploads[place] - shared)


def seen(kind: str, colluders: int) -> dict[str, np.ndarray]:
    """What the server and its colluders can compute without the keys of two honest members."""
    rng = np.random.default_rng(1)
    listed = MaskedList.of(colluders, rng)
    shape = (ROUNDS, ATTEMPTS, NUMBERS)
    single, rest = np.zeros(shape, kind), np.zeros(shape, kind)
    for round in range(ROUNDS):
        for number in range(ATTEMPTS):
            attempt = listed.attempt(number + 1)
            words = rng.integers(0, 1000, (MEMBERS, NUMBERS)).astype(kind)
            uploads = listed.masked(words, attempt, round + 1)
            assert (uploads.sum(0, dtype=kind) == words.sum(0, dtype=kind)).all()
            single[round, number] = listed.bare(uploads, 0, attempt, round + 1)
            honest_sum = words[: listed.honest].sum(0, dtype=kind)
            last = listed.bare(uploads, listed.honest - 1, attempt, round + 1)
            rest[round, number] = honest_sum - last
    return {
        "one upload": single,
        "difference of two rounds": single[1] - single[0],
        "difference of two attempts": single[:, 1:] - single[:, :-1],
        "sum of all honest uploads but one": rest,
    }


def not_uniform(found: dict[str, np.ndarray]) -> set[str]:
    """Which of these fail the test, all of them together by chance once in a million."""
    groups = 2 * next(iter(found.values())).dtype.itemsize
    failed = set()
    for name, words in found.items():
        flat = words.ravel()
        for shift in range(0, 4 * groups, 4):
            counts = np.bincount((flat >> shift & 15).astype(np.int64), minlength=16)
            expected = counts.mean()
            p = chi2.sf(((counts - expected) ** 2 / expected).sum(), 15)
            if p < ALARM / (groups * len(found)):
                failed.add(name)
    return failed


@pytest.mark.parametrize("colluders", [0, 2, 3])
@pytest.mark.parametrize("kind", ["<u4", "<u8"])
def test_masked_uploads_look_uniform(kind, colluders):
    assert not_uniform(seen(kind, colluders)) == set()


def test_whoever_has_the_keys_of_all_others_sees_one_upload():
    """The test can fail: nothing hides a site from all others."""
    assert "one upload" in not_uniform(seen("<u4", 4))


def one_label(*given):
    """The mask of round 1, attempt 1, whatever is asked for."""
    pairs, name, _, _, agreed, count, bits = given
    return PROPER(pairs, name, 1, 1, agreed, count, bits)


def one_round(*given):
    """The mask of round 1, whatever is asked for."""
    pairs, name, _, attempt, agreed, count, bits = given
    return PROPER(pairs, name, 1, attempt, agreed, count, bits)


def short(*given):
    """The same masks in all but the eight highest bits, which are missing."""
    pairs, name, *rest, bits = given
    low = (1 << (bits - 8)) - 1
    total = np.zeros(given[5], f"<u{bits // 8}")
    for other, pair in pairs.items():
        stream = abs_stream(pair, name, other, *rest, bits) & low
        total += stream if name < other else -stream
    return total


def abs_stream(pair, name, other, *rest):
    """The stream of a pair, before one of them changes its sign."""
    words = PROPER({other: pair}, name, *rest)
    return words if name < other else -words


def no_mask(*given):
    return 0 * PROPER(*given)


@pytest.mark.parametrize("mistake", [one_label, one_round, short, no_mask])
def test_masks_that_are_reused_or_short_or_missing(monkeypatch, mistake):
    monkeypatch.setattr(site_module, "mask", mistake)
    assert not_uniform(seen("<u8", 1)) != set()
