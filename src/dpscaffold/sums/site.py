"""What a site does: make keys, and make its one file. Its ledger has a line before anything is
computed, and one session gives one file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from pydantic import ValidationError

from dpscaffold.atomic import write_text
from dpscaffold.data.sentences import mistake_of
from dpscaffold.deployment.protocol.masks import (
    EpochKey,
    agreement_digest,
    announce,
    mask,
    pair_keys,
)
from dpscaffold.deployment.protocol.messages import Refused, fingerprint, public_of
from dpscaffold.deployment.protocol.sums import Members
from dpscaffold.deployment.provision import (
    make_signing_key,
    read_signing_key,
    read_toml,
    site_name,
    write_whole,
)
from dpscaffold.deployment.provision.keys import read_secret, write_secret
from dpscaffold.deployment.site.begin import BEGUN
from dpscaffold.deployment.site.file import (
    SiteGrant,
    SumsSite,
    Terms,
    check_terms,
    grant,
    read_site_file,
)
from dpscaffold.deployment.site.layout import SIGNING_KEY, refuse_other_state
from dpscaffold.deployment.site.ledger import GrantedRun, SiteLedger
from dpscaffold.deployment.site.memory import StateFolder
from dpscaffold.deployment.site.reading import SiteRecords, read_records
from dpscaffold.deployment.site.secure import check_members
from dpscaffold.deployment.site.work import terms_of_sums
from dpscaffold.errors import BadInput
from dpscaffold.randomness.csprng import CipherStream
from dpscaffold.sums.files import (
    KeyFile,
    key_files,
    read_key_file,
    session_of,
    write_sums,
)
from dpscaffold.sums.plan import SumsPlan
from dpscaffold.sums.tables import SUMMED
from dpscaffold.tasks.base import Batch
from dpscaffold.tasks.exact import check_records

#: Records that are multiplied out at a time.
BLOCK = 1 << 16

_TEMPLATE = """# This site's file. It stays here: read it, and set the data and the policy.
# Next to it: site.key, and the folder state with the ledger. Never restore that folder from a
# backup, and never copy it.
name = "{name}"

[data]
source = "csv"
path = "records.csv"

[secure]                   # masked sums; without this table the site takes part in none
colluders = {colluders}              # members who may work with whoever combines
least = {least}                  # the fewest members, this site included
epsilon_alone = 20.0       # all sums together, if all others collude; one: epsilon_alone/max_runs

[secure.members]           # fingerprints of the other sites, compared by telephone

[policy]
epsilon = 2.0              # all sums and runs over these records together
delta = 1e-5               # likewise; one sum has delta/max_runs
max_runs = 2               # each may spend at most epsilon/max_runs
algorithms = {algorithms}
tasks = ["logistic", "linear"]
"""


def read_sums_site(path: Path) -> SumsSite:
    """Read and check a site's file; that of a deployed site serves as well."""
    tables = read_toml(path, "the site's file")
    if "server" in tables:
        return read_site_file(path)
    refuse_other_state(path, tables)
    try:
        site = SumsSite.model_validate(tables)
    except ValidationError as error:
        code, sentence = mistake_of(error, SumsSite)
        raise BadInput(code, f"{path}: {sentence}") from None
    site_name(site.name)
    return site.placed(path.resolve().parent)


def make_keys(plan: SumsPlan, name: str, folder: Path) -> Path:
    """A site's folder, if it is new, and a key file for one session."""
    if name not in plan.members:
        raise BadInput(
            "unknown-site",
            f"--name is {name!r}, and the plan's members are {', '.join(plan.members)}; give one",
        )
    path = folder / "site.toml"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        begun = folder / BEGUN
        if begun.exists():  # making this site was cut short, so nobody knows of its key
            (folder / SIGNING_KEY).unlink(missing_ok=True)
        begun.touch()
        make_signing_key(folder / SIGNING_KEY)
        k = 1 if plan.sums.colluders is None else plan.sums.colluders
        given = {"name": name, "colluders": k, "least": k + 2, "algorithms": json.dumps(SUMMED)}
        write_text(path, _TEMPLATE.format(**given))
        begun.unlink()
    site = read_sums_site(path)
    if site.name != name:
        raise BadInput("unknown-site", f"{path} is the file of {site.name!r}, not of {name!r}")
    signer, key = read_signing_key(site.signing_key), EpochKey.fresh()
    place = _key_path(site, plan)
    if place.exists():  # a key that was never used is replaced
        _erase(place)
    write_secret(place, key.epoch.encode() + key.private.private_bytes_raw())
    out = folder / f"{name}.sumkey"
    made = KeyFile(plan.digest, public_of(signer), announce(plan.session, name, key, signer))
    write_text(out, made.to_json())
    return out


def _key_path(site: SumsSite, plan: SumsPlan) -> Path:
    return site.state / "sums" / f"{plan.digest[:32]}.key"


@dataclass(frozen=True)
class MadeSums:
    """What a site made: the file, and what it cost."""

    path: Path
    again: bool
    epsilon: float
    delta: float
    epsilon_alone: float | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, path: Path, again: bool, granted: SiteGrant, notes: tuple[str, ...] = ()
    ) -> MadeSums:
        """With what the ledger granted."""
        epsilon, alone = granted.epsilon or 0.0, granted.epsilon_alone
        return cls(path, again, epsilon, granted.delta, alone, notes)


def make_sums(
    plan: SumsPlan, site_path: Path, key_paths: Sequence[Path] = (), out: Path | None = None
) -> MadeSums:
    """A site's file for one session; a second call gives the same file again.

    Everything that can be refused is refused before the ledger has a line.
    """
    site = read_sums_site(site_path)
    if bool(key_paths) != plan.masked:
        raise BadInput(
            "bad-members",
            "the plan asks for masked sums (sums.colluders); give --keys with a file of every site"
            if plan.masked
            else "the plan does not mask sums; leave --keys out, or set sums.colluders in it",
        )
    if site.name not in plan.members:
        raise BadInput(
            "unknown-site",
            f"{site.name!r} is not among the plan's members ({', '.join(plan.members)})",
        )
    files = [read_key_file(path) for path in key_files(key_paths)]
    session = session_of(plan, files)
    out = out or site_path.resolve().parent / f"{site.name}.sums"
    state = StateFolder(site.state, site.name)
    try:
        return _made(plan, site, site_path.resolve().parent, files, session, out)
    except Refused as no:
        raise BadInput("site-refuses", f"this site's policy or data refuse the sum: {no}") from no
    finally:
        state.close()


def _made(
    plan: SumsPlan, site: SumsSite, folder: Path, files: Sequence[KeyFile], session: str, out: Path
) -> MadeSums:
    ledger = SiteLedger(site.state / "ledger.jsonl", site.name)
    stored = site.state / "sums" / f"{session}.sums"
    reserved = session in ledger.runs
    if reserved and ledger.runs[session].participations:
        return _again(ledger, stored, session, out)
    _refuse_attempted(plan, ledger)
    signer = read_signing_key(site.signing_key)
    key = _own_key(plan, site, files, public_of(signer))
    _check_members(site, files, public_of(signer))
    held = read_records(site.data, folder, plan.offer.rows)
    check_records(len(held))
    granted, account = _granted(plan, site, ledger, session)
    if not reserved:  # else it was cut short after this, and nothing was computed
        ledger.reserve(GrantedRun(session, plan.digest, granted, account))
    ledger.begin(session, plan.digest)
    ledger.participate(session, 1)
    words = noised_words(plan, held, CipherStream())
    if key is not None:
        words = words + _mask(plan, site, key, files, len(words))
    content = write_sums(plan, session, site.name, words, signer)
    stored.parent.mkdir(parents=True, exist_ok=True)
    write_whole(stored, content)
    if key is not None:
        _erase(_key_path(site, plan))
    write_whole(out, content)
    notes = tuple(sentence for sentence, fine in held.notes if not fine)
    return MadeSums.of(out, False, granted, notes)


def _refuse_attempted(plan: SumsPlan, ledger: SiteLedger) -> None:
    """Refuse new key files for an attempt that this site has taken part in: the statement counts
    as many sums as the plan has attempts."""
    made = [run for run in ledger.runs.values() if run.plan == plan.digest and run.participations]
    if made:
        raise BadInput(
            "session-spent",
            f"the ledger has a line for attempt {plan.sums.attempt} of this plan, with other key "
            f"files; set sums.attempt to {plan.sums.attempt + 1} in the plan and make new key "
            f"files at all sites",
        )


def _again(ledger: SiteLedger, stored: Path, session: str, out: Path) -> MadeSums:
    """The file of a session that has its line in the ledger, byte for byte, or a refusal."""
    if not stored.exists():
        raise BadInput(
            "session-spent",
            "the ledger has a line for this session, and its file was not finished; a session is "
            "never repeated: set sums.attempt to the next number in the plan (masked: and make new "
            "key files) at all sites",
        )
    write_whole(out, stored.read_bytes())
    return MadeSums.of(out, True, ledger.runs[session].grant)


def _own_key(
    plan: SumsPlan, site: SumsSite, files: Sequence[KeyFile], public: str
) -> EpochKey | None:
    own = next((file for file in files if file.key.name == site.name), None)
    if own is None:
        return None
    path = _key_path(site, plan)
    held = read_secret(path) if path.exists() else b""
    if own.public != public or held[:-32] != own.key.epoch.encode():
        raise BadInput(
            "not-this-site",
            f"the key file of {site.name!r} was not made here, or was used already; make a new one "
            f"with 'dpscaffold sums keys' and send it to all sites",
        )
    return EpochKey(own.key.epoch, X25519PrivateKey.from_private_bytes(held[-32:]))


def _check_members(site: SumsSite, files: Sequence[KeyFile], public: str) -> None:
    """Members whose fingerprint nobody confirmed count as colluders."""
    if not files:
        return
    if site.policy.secure is None:
        raise Refused("policy-secure", "site.toml has no [secure]")
    publics = {file.key.name: file.public for file in files}
    try:
        members = Members(tuple(publics), (), publics)
        check_members(site.policy.secure, site.name, public, members)
    except Refused as no:
        lines = ", ".join(
            f'{name} = "{fingerprint(key)}"' for name, key in publics.items() if name != site.name
        )
        raise BadInput(
            "not-confirmed",
            f"{no}; compare fingerprints by telephone, then write into [secure.members] of "
            f"site.toml those that are right: {lines}",
        ) from no


def _granted(
    plan: SumsPlan, site: SumsSite, ledger: SiteLedger, session: str
) -> tuple[SiteGrant, dict[str, Any]]:
    """One participation, if the policy allows it, and what the ledger keeps of its account."""
    terms, declared = _terms(plan, site.name), plan.setting.roster.declared
    check_terms(site.policy, terms)
    left = ledger.left(site.policy, session)
    granted = grant(site.policy, terms, 1, 1, left, declared, most=1)
    return granted, terms.to_dict(1, 1, declared)


def _terms(plan: SumsPlan, name: str) -> Terms:
    offer, user = plan.offer, plan.members.index(name)
    return Terms(
        rounds=1,
        local_steps=1,
        user_ratio=1.0,
        data_ratio=1.0,
        weighting=offer.plan.weighting,
        algorithm=offer.algorithm.name,
        task=offer.task.kind,
        parameters=plan.task.parameters,
        mechanism=plan.setting.privacy,
        query="sums",
        sums=terms_of_sums(plan.setting, user, 0) if plan.masked else None,
    )


def noised_words(plan: SumsPlan, held: SiteRecords, stream: CipherStream) -> np.ndarray:
    """rint((Σ f + noise)/g) modulo 2⁶⁴, (P,) uint64: summed exactly, block by block,
    and rounded after adding."""
    task = plan.task
    total = torch.zeros(task.parameters, dtype=torch.float64)
    clip, params = torch.tensor([task.bound]), torch.zeros(1, task.parameters)
    for start in range(0, len(held), BLOCK):
        rows = slice(start, start + BLOCK)
        weight = None if bool(held.used[rows].all()) else held.used[rows].double()[None]
        batch = Batch(held.features[rows][None], held.labels[rows][None], weight)
        total -= task.clipped_sum(params, batch, clip).total[0]
    noise = torch.from_numpy(stream.standard_normal(task.parameters))
    return plan.grid.words(plan.grid.quantise(total + plan.deviation * noise))


def _mask(
    plan: SumsPlan, site: SumsSite, key: EpochKey, files: Sequence[KeyFile], count: int
) -> np.ndarray:
    keys = {file.key.name: file.key for file in files}
    pairs = pair_keys(plan.session, site.name, key, keys)
    agreed = agreement_digest({name: k.epoch for name, k in keys.items()}, plan.digest.encode())
    return mask(pairs, site.name, 1, 1, agreed, count, 64)


def _erase(path: Path) -> None:
    """Overwrite a key and remove it."""
    with path.open("r+b") as stream:
        stream.write(bytes(path.stat().st_size))
    path.unlink()
