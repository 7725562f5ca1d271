"""What the campaign needs of deployed federations and of sums by e-mail."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from forked import expect
from works import done

from dpscaffold.runs.ledger import read_account

RUN = "ab" * 16


def mail_sites(folder: Path) -> None:
    """Its two sites, with keys and records, each of which knows the other."""
    from dpscaffold.deployment.protocol.messages import fingerprint
    from dpscaffold.sums.files import read_key_file

    names = ("north", "south")
    done(folder, *(["sums", "keys", "mail.toml", "--name", name] for name in names))
    for name, other in (names, names[::-1]):
        shutil.copy(folder / "rows.csv", folder / name / "records.csv")
        public = read_key_file(folder / other / f"{other}.sumkey").public
        path = folder / name / "site.toml"
        line = f'{other} = "{fingerprint(public)}"'
        path.write_text(path.read_text().replace("\n[policy]", f"{line}\n[policy]"))


def make_mail(name: str) -> list[str]:
    """The command that makes a site's file."""
    keys = [word for one in ("north", "south") for word in ("--keys", f"{one}/{one}.sumkey")]
    out = ["--out", f"{name}/{name}.sums"]
    return ["sums", "make", "mail.toml", "--site", f"{name}/site.toml", *keys, *out]


def mailed(folder: Path) -> None:
    """The files of both sites."""
    mail_sites(folder)
    done(folder, make_mail("north"), make_mail("south"))


def keyed(folder: Path) -> object:
    """That the key file of a site is signed by its own key, which nobody else may read."""
    from dpscaffold.deployment.protocol.masks import verified_keys
    from dpscaffold.deployment.protocol.messages import public_of
    from dpscaffold.deployment.provision import read_signing_key
    from dpscaffold.sums.files import read_key_file
    from dpscaffold.sums.plan import load_plan

    made = read_key_file(folder / "north" / "north.sumkey")
    own = public_of(read_signing_key(folder / "north" / "site.key"))
    verified_keys(load_plan(folder / "mail.toml").session, [made.key], {"north": own})
    return own == made.public, [path.suffix for path in (folder / "north/state/sums").iterdir()]


def counted_once(folder: Path) -> object:
    """One line for the session, and one file that is whole, or none for ever."""
    from dpscaffold.deployment.site.ledger import SiteLedger
    from dpscaffold.sums.files import read_sums

    made = folder / "north" / "north.sums"
    stored = list((folder / "north" / "state" / "sums").glob("*.sums"))
    if made.exists():
        read_sums(made)
        expect(bool(stored), "a file left without having been stored", folder)
    kept = not stored or made.read_bytes() == stored[0].read_bytes()
    expect(kept, "the file that left is not the one that was stored", folder)
    return SiteLedger(folder / "north" / "state" / "ledger.jsonl", "north").total


def combined(folder: Path) -> object:
    """The model and both ε of its folder."""
    from dpscaffold.models.loading import load_model
    from dpscaffold.privacy import Statement

    said = read_account(folder / "model").statement()
    written = json.loads((folder / "model" / "model" / "privacy.json").read_text())
    same = Statement.from_json(written, "privacy.json").guarantees == said.guarantees
    expect(same, "privacy.json is not what the ledger says", folder)
    epsilons = said.towards("server").epsilon, said.towards("alone").epsilon
    return load_model(folder / "model").params.tolist(), epsilons


def a_site_behind(folder: Path) -> None:
    """A site whose server has seen more than its ledger holds."""
    from dpscaffold.deployment.site.file import SiteGrant, read_site_file
    from dpscaffold.deployment.site.ledger import GrantedRun, SiteLedger
    from dpscaffold.deployment.site.memory import StateFolder
    from dpscaffold.deployment.site.recovery import note_behind

    joined = ["site", "init", "keys/one.invitation", "--out", "one"]
    done(folder, ["provision", "sites.toml", "--out", "keys"], joined)
    file = read_site_file(folder / "one" / "site.toml")
    state = StateFolder(file.state, file.name)
    ledger = SiteLedger(state.ledger, file.name)
    ledger.reserve(GrantedRun(RUN, "plan", SiteGrant(9, None, 0.0), {}))
    ledger.begin(RUN, "fixed")
    ledger.participate(RUN, 1)
    note_behind(state, RUN, 4, 4)
    state.close()


def recovered(folder: Path) -> object:
    """That the whole grant is recorded as spent, and the site is not behind any more."""
    from dpscaffold.deployment.site.file import read_site_file
    from dpscaffold.deployment.site.ledger import SiteLedger

    file = read_site_file(folder / "one" / "site.toml")
    entry = SiteLedger(file.state / "ledger.jsonl", file.name).runs[RUN]
    whole = entry.participations >= entry.grant.participations
    expect(whole, f"{entry.participations} of {entry.grant.participations} are reserved", folder)
    return (file.state / "behind.json").exists()


def site_made(folder: Path) -> object:
    """A site whose keys belong to what it asks to be admitted with."""
    from dpscaffold.deployment.protocol.messages import public_of
    from dpscaffold.deployment.provision import read_member, read_node_key, read_signing_key
    from dpscaffold.deployment.site.file import read_site_file

    file = read_site_file(folder / "one" / "site.toml")
    member = read_member(folder / "one" / "one.site")
    read_node_key(file.node_key)
    return public_of(read_signing_key(file.signing_key)) == member.signing_key


def roster(folder: Path) -> object:
    """Who is on the server's roster."""
    from dpscaffold.deployment.provision import roster as members

    return [member.name for member in members(folder / "keys" / "server")]
