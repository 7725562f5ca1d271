"""A federation at a glance: labels by user, and how large users are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpscaffold.data.heterogeneity import Description
from dpscaffold.report.drawing import new_figure, save_figure
from dpscaffold.report.fitting import shown_users

#: More rows than this cannot be told apart on paper.
MOST_USERS = 400


def description_figure(description: Description) -> Figure:
    """A heatmap of each user's label shares, the pooled shares above it, and the distribution of
    sizes."""
    figure = new_figure(9.5, 5.4)
    grid = figure.add_gridspec(2, 2, width_ratios=(2.2, 1), height_ratios=(1, 4))
    heat = figure.add_subplot(grid[1, 0])
    _labels_by_user(heat, description)
    _pooled_labels(figure.add_subplot(grid[0, 0], sharex=heat), description)
    _sizes(figure.add_subplot(grid[:, 1]), description)
    figure.suptitle(
        f"{description.title}: {description.users:,} users, "
        f"{description.train_records:,} training records\n"
        f"label heterogeneity {description.label_heterogeneity:.3f} (i.i.d. about "
        f"{description.label_heterogeneity_iid:.3f})",
        fontsize=11,
    )
    return figure


def _labels_by_user(axes: Axes, description: Description) -> None:
    chosen = shown_users(description.users, MOST_USERS)
    counts = description.counts[chosen]
    shares = counts / counts.sum(axis=1, keepdims=True)
    image = axes.imshow(
        shares,
        aspect="auto",
        interpolation="nearest",
        cmap="viridis",
        vmin=0,
        vmax=max(float(shares.max()), 1e-9),
    )
    few = len(chosen) < description.users
    axes.set_ylabel(f"user ({len(chosen)} of {description.users:,} shown)" if few else "user")
    places = np.unique(np.linspace(0, len(chosen) - 1, min(len(chosen), 11)).round().astype(int))
    axes.set_yticks(places, [_short(description.names[chosen[i]]) for i in places])
    if description.classes <= 20:
        axes.set_xticks(range(description.classes))
    axes.set_xlabel("label")
    bar = axes.figure.colorbar(image, ax=axes, location="bottom", shrink=0.6, aspect=40, pad=0.02)
    bar.set_label("share of the user's training records")


def _pooled_labels(axes: Axes, description: Description) -> None:
    totals = description.counts.sum(axis=0)
    axes.bar(np.arange(len(totals)), totals / totals.sum(), color="0.45")
    axes.set_ylabel("all users")
    axes.tick_params(labelbottom=False)
    axes.spines[["top", "right"]].set_visible(False)


def _sizes(axes: Axes, description: Description) -> None:
    sizes = description.counts.sum(axis=1)
    low, high = int(sizes.min()), int(sizes.max())
    if low == high:
        axes.bar([low], [description.users], width=max(1.0, 0.1 * low), color="0.45")
        axes.set_xlim(0, 2 * low)
    else:
        axes.hist(sizes, bins=min(40, high - low + 1), color="0.45")
    axes.set_xlabel("training records of a user")
    axes.set_ylabel("users")
    axes.spines[["top", "right"]].set_visible(False)


def _short(name: str, most: int = 12) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def save_description(description: Description, path: str | Path) -> None:
    """Write the figure; the ending of the name chooses PNG, SVG or PDF."""
    save_figure(description_figure(description), path, 150)
