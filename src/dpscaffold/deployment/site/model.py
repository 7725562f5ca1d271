"""The models that a site keeps of a finished run, in ordinary model folders of its state."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from dpscaffold.algorithms.mean_regularised import given_out
from dpscaffold.deployment.protocol.agreement import Offer
from dpscaffold.deployment.protocol.enrolment import EnrolledRun
from dpscaffold.deployment.protocol.messages import Vectors
from dpscaffold.deployment.server.agreed import model_on, roster_of
from dpscaffold.deployment.site.memory import Enrolment
from dpscaffold.models.personal import noised_personal
from dpscaffold.models.storage import save_model
from dpscaffold.models.trained import Origin

#: Where a state folder keeps models.
MODELS = "models"


def keep_models(
    state: Path,
    site: str,
    known: Enrolment,
    offer: Offer,
    params: np.ndarray,
    slots: Vectors,
    rounds: int,
) -> None:
    """Write the final model of a run to ``models/RUN``, and to ``models/RUN-own`` the one that the
    run trained for this site, if it trained one.

    Neither carries a privacy statement: what the run promises for the records of all sites is known
    at the server (``privacy.md`` in the run folder), and this site's own ε is in its ledger.

    Args:
        state: The state folder.
        site: The site's name.
        known: What the site agreed to in the run.
        offer: The offer in it, whose code the policy accepts.
        params: The parameters that the server sent, (P,).
        slots: The site's memory of the run.
        rounds: The last round in which the site took part.
    """
    enrolled = EnrolledRun(known.run, known.offer, known.roster, "", known.sizes)
    roster = roster_of(offer, enrolled)
    origin = Origin(offer.algorithm.name, roster.title, rounds, offer.rows.label)
    common = torch.from_numpy(params.copy())
    model = model_on(offer.rows, roster, offer.build_task(), common, origin)
    save_model(model, state / MODELS / known.run)
    if "personal" in slots:
        tensors = {name: torch.as_tensor(value)[None] for name, value in slots.items()}
        own = given_out(tensors, common)[0]
        save_model(noised_personal(model, own, site), state / MODELS / f"{known.run}-own")
