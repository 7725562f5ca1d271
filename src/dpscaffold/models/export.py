"""Models for other software: ONNX, PyTorch's exported programs, or our own folder."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dpscaffold.atomic import atomic_file
from dpscaffold.checks import choice
from dpscaffold.data.tables.cells import CellReader
from dpscaffold.data.tables.codec import Coding
from dpscaffold.data.tables.missing import default_na_strings
from dpscaffold.errors import BadInput
from dpscaffold.models.model import Model
from dpscaffold.privacy import line

#: What a model can be exported to, and how its file or folder is called by default.
FORMATS = {"onnx": "model.onnx", "torch": "model.pt2", "safetensors": "model"}
#: Domain of ONNX's operators on texts, and the versions that are written.
ML, ML_VERSION, VERSION = "ai.onnx.ml", 3, 18


def export(model: Model, to: str, out: Path, only_protected: bool = False) -> Path:
    """Write a model for other software.

    - ``onnx``: raw rows in, scores out. Columns of numbers are one input ``numbers`` (N, k) and
      every categorical column is an input of texts (N, 1) under its own name. Needs the extra
      ``onnx``.
    - ``torch``: a ``.pt2`` program (``torch.export.load(path).module()``) of
      :class:`~dpscaffold.models.module.WholeModel`; it needs none of this package.
    - ``safetensors``: the folder that :func:`~dpscaffold.load_model` reads.

    With ``only_protected`` a model is refused that carries statistics fitted without protection,
    that was trained without a guarantee, or in a simulation.
    """
    choice("--to", to, tuple(FORMATS))
    if only_protected:
        _refuse_unprotected(model)
    if to == "safetensors":
        return model.save(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(out) as partial, _quietly():
        _to_torch(model, partial) if to == "torch" else _to_onnx(model, partial)
    return out


def _refuse_unprotected(model: Model) -> None:
    """Refuse a model that a promise does not cover, or not all of it."""
    if model.unprotected:
        more = len(model.unprotected) - 1
        raise BadInput(
            "not-protected",
            f"--only-protected is given, but the model carries what no guarantee covers: "
            f"{model.unprotected[0]}{f' (and {more} more)' if more else ''} Prepare the data with "
            f"public or private statistics, and name classes and categories beforehand",
        )
    said = model.privacy
    if said is None or not said.guarantee:
        raise BadInput(
            "not-protected",
            f"--only-protected is given, but the model was trained without a guarantee "
            f"({(said and said.reason) or 'it has no privacy statement'}); train it with "
            f"privacy.noise or privacy.epsilon",
        )
    if said.seeded:
        raise BadInput(
            "not-protected",
            "--only-protected is given, but the model comes from a simulation, whose noise can be "
            "removed by whoever has its seed; train it with privacy.release = true",
        )


def described(model: Model) -> dict[str, str]:
    """What goes along with an exported file: columns, classes, categories and the statement."""
    coding = next((step for step in model.preparation if isinstance(step, Coding)), None)
    categories = dict(coding.categories) if coding else {}
    values: dict[str, Any] = {
        "columns": list(model.columns),
        "target": model.target.kind,
        "range": None if model.target.low is None else [model.target.low, model.target.high],
        "classes": list(model.classes),
        "categories": {name: list(known) for name, known in categories.items()},
        "na_values": {name: list(markers) for name, markers in coding.na_values} if coding else {},
        "values": {
            name: {value: list(listed) for value, listed in pairs}
            for name, pairs in (coding.values if coding else ())
        },
        "privacy": line(model.privacy) if model.privacy else "No privacy statement is known.",
        "leaves_unprotected": list(model.unprotected),
    }
    return {key: json.dumps(value, ensure_ascii=False) for key, value in values.items()}


def _to_torch(model: Model, path: Path) -> None:
    program = _program(model.to_module(), len(model.columns))
    archive = io.BytesIO()  # PyTorch ends the whole process where a file cannot take it
    torch.export.save(program, archive, extra_files=described(model))
    path.write_bytes(archive.getbuffer())


def _program(module: nn.Module, width: int) -> Any:
    batch = torch.export.Dim("rows", min=1)
    return torch.export.export(module, (torch.zeros(3, width),), dynamic_shapes=({0: batch},))


def _to_onnx(model: Model, path: Path) -> None:
    try:
        import onnx
        import onnxscript  # noqa: F401  (PyTorch's exporter needs it)
    except ImportError:
        raise BadInput(
            "package-missing",
            "--to onnx needs more packages; install them with: pip install 'dpscaffold[onnx]'",
        ) from None
    core = _graph(model.to_module(), len(model.columns))
    whole = _with_texts(onnx, core, model)
    for key, value in described(model).items():
        entry = whole.metadata_props.add()
        entry.key, entry.value = key, value
    onnx.checker.check_model(whole)
    onnx.save(whole, path)


def _graph(module: nn.Module, width: int) -> Any:
    """A module as ONNX, from ``rows`` (N, width) to ``scores``."""
    program = torch.onnx.export(
        _program(module, width),
        input_names=["rows"],
        output_names=["scores"],
        opset_version=VERSION,
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    return program.model_proto


def _with_texts(onnx: Any, core: Any, model: Model) -> Any:
    """The exported program behind nodes that turn texts into numbers of categories and put the
    columns in order."""
    coding = next((step for step in model.preparation if isinstance(step, Coding)), None)
    known: Mapping[str, tuple[str, ...]] = dict(coding.categories) if coding else {}
    numbers = [name for name in model.columns if name not in known]
    helper, kinds = onnx.helper, onnx.TensorProto
    nodes, inputs, parts = [], [], []
    if numbers:
        inputs.append(helper.make_tensor_value_info("numbers", kinds.FLOAT, ["rows", len(numbers)]))
    for k, name in enumerate(model.columns):
        if name in known:
            inputs.append(helper.make_tensor_value_info(name, kinds.STRING, ["rows", 1]))
            cells = coding.reader() if coding else CellReader()
            na_values, other = cells.na.of(name), cells.spellings.of(name)
            nodes.append(_encoder(helper, name, known[name], na_values, other, f"code {k}"))
            parts.append(f"code {k}")
    at = {name: j for j, name in enumerate(numbers)}
    joined = ["numbers"] * bool(numbers) + parts
    nodes.append(helper.make_node("Concat", joined, ["joined"], axis=1))
    texts = [name for name in model.columns if name in known]
    order = [at[n] if n in at else len(numbers) + texts.index(n) for n in model.columns]
    place = helper.make_tensor("order", kinds.INT64, [len(order)], order)
    nodes.append(helper.make_node("Gather", ["joined", "order"], ["ordered"], axis=1))
    out = helper.make_tensor_value_info("ordered", kinds.FLOAT, ["rows", len(order)])
    graph = helper.make_graph(nodes, "raw rows", inputs, [out], [place])
    opsets = [helper.make_opsetid("", VERSION), helper.make_opsetid(ML, ML_VERSION)]
    before = helper.make_model(graph, opset_imports=opsets, ir_version=core.ir_version)
    if not any(entry.domain == ML for entry in core.opset_import):
        core.opset_import.append(helper.make_opsetid(ML, ML_VERSION))
    return onnx.compose.merge_models(before, core, io_map=[("ordered", "rows")])


def _encoder(
    helper: Any,
    name: str,
    values: tuple[str, ...],
    na_values: tuple[str, ...],
    other: Mapping[str, str],
    out: str,
) -> Any:
    """A text ↦ the number of its category, also in another spelling; NA strings (``na_values``, and
    those of every file) are missing, others are unknown."""
    known = {value: float(k) for k, value in enumerate(values)}
    known |= {text: known[value] for text, value in other.items() if value in known}
    known |= {gap: float("nan") for gap in (*default_na_strings(), *na_values)}
    return helper.make_node(
        "LabelEncoder",
        [name],
        [out],
        domain=ML,
        keys_strings=[*known],
        values_floats=[*known.values()],
        default_float=-1.0,
    )


class _quietly(warnings.catch_warnings):
    """Without the exporters' own chatter."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
