"""FedNova: averaging that stays fair where users take different numbers of local steps (Wang et al.
2020)."""

from dpscaffold.algorithms.base import Algorithm, Cohort, Local, Participant, Server, Slots, Upload
from dpscaffold.algorithms.fedavg import fedavg


def tell_mean_steps(server: Server, cohort: Cohort) -> Slots:
    """Participants receive τ = Σ w_i·K_i, the cohort's mean number of steps."""
    weights, steps = cohort.weights, cohort.known.steps
    if isinstance(steps, int):
        return {"mean_steps": weights.new_full((1,), float(steps))}
    return {"mean_steps": (weights * steps.to(weights.device).reshape(-1)).sum().reshape(1)}


def send_normalised(local: Local, at: Participant) -> tuple[Upload, Slots]:
    """(τ/K_i)·Δy_i: every user counts by its direction, not by how many steps it took."""
    share = at.broadcast.shared["mean_steps"] / at.known.steps
    return Upload(share * (local.params - at.broadcast.params)), {}


def fednova() -> Algorithm:
    """Normalised averaging for users with K_i of their own (``plan.steps_by_user``).

    FedAvg with unequal K_i drifts towards users that take more steps; here every Δy_i is divided by
    K_i first. With equal K_i it is FedAvg.

    >>> fednova().title
    'FedNova'
    """
    return fedavg().replace(
        name="fednova", title="FedNova", announce=tell_mean_steps, finish=send_normalised
    )
