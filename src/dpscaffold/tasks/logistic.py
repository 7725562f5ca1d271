"""Multinomial logistic regression: the linear model of the paper's experiments."""

from __future__ import annotations

from dpscaffold.tasks.linear import Linear


class Logistic(Linear):
    """Softmax regression with a bias: f(x; (a, y)) = −log softmax(Wa + w₀)_y.

    The linear model with one score a class and the softmax loss; see
    :class:`~dpscaffold.tasks.linear.Linear`. On unit-norm rows ‖a‖ = √2 with the bias and ‖δ‖ ≤ √2:
    no per-example gradient is longer than 2.

    >>> task = Logistic(features=2, classes=3)
    >>> task.parameters
    9
    """

    def __init__(self, features: int, classes: int) -> None:
        super().__init__(features, classes)

    name = "logistic"

    def __repr__(self) -> str:
        return f"Logistic(features={self.features}, classes={self.classes})"

    @property
    def classes(self) -> int:
        """One score a class."""
        return self.outputs
