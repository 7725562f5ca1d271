"""A frozen ONNX network as a preprocessing step: its numbers, its travels and its refusals."""

import json

import numpy as np
import pytest
from refusals import refuses

from dpscaffold.data.encoder import Encoder
from dpscaffold.data.shapes import shape_of
from dpscaffold.data.stored import entries, steps

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
RNG = np.random.default_rng(3)
WEIGHTS = RNG.standard_normal((64, 5)).astype(np.float32)


def network(path, batch="rows", shape=(1, 8, 8), outputs=1, kind=None):
    """relu(flatten(x) @ WEIGHTS), as an ONNX file."""
    helper, floats = onnx.helper, onnx.TensorProto.FLOAT
    nodes = [
        helper.make_node("Flatten", ["x"], ["flat"], axis=1),
        helper.make_node("MatMul", ["flat", "w"], ["product"]),
        helper.make_node("Relu", ["product"], ["y"]),
    ]
    kept = [helper.make_tensor("w", floats, WEIGHTS.shape, WEIGHTS.ravel().tolist())]
    given = helper.make_tensor_value_info("x", kind or floats, [batch, *shape])
    names = ["y", "product"][:outputs]
    answers = [helper.make_tensor_value_info(name, floats, [batch, 5]) for name in names]
    graph = helper.make_graph(nodes, "net", [given], answers, kept)
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)
    return path


@pytest.fixture
def path(tmp_path):
    return str(network(tmp_path / "net.onnx"))


def test_features_are_those_of_the_network(path) -> None:
    rows = RNG.random((600, 64), dtype=np.float32)
    step = Encoder.read(path)
    assert (step.shape, step.width, step.outputs) == ((1, 8, 8), 64, 5)
    np.testing.assert_allclose(step(rows), np.maximum(rows @ WEIGHTS, 0), atol=1e-5)
    assert step.protection == "public" and step.cost is None
    assert "must not have been trained on these records" in step.sentence


def test_it_is_stored_whole_and_a_changed_file_is_noticed(path) -> None:
    step = Encoder.read(path)
    listed, arrays = entries([step])
    assert listed[0]["digest"] == step.digest
    (again,) = steps(json.loads(json.dumps(listed)), arrays, path)
    assert again == step
    network = arrays["0.network"].copy()
    network[100] ^= 1
    with refuses("data-damaged: digest"):
        steps(listed, {"0.network": network}, path)
    with refuses("encoder-changed: sha256"):
        Encoder.read(path, "0" * 64)
    assert Encoder.read(path, step.digest) == step


def test_a_network_that_does_not_fit_is_refused(tmp_path) -> None:
    (tmp_path / "text.onnx").write_text("not a network")
    with refuses("encoder-unreadable: text.onnx"):
        Encoder.read(str(tmp_path / "text.onnx"))
    with refuses("file-unreadable: absent.onnx"):
        Encoder.read(str(tmp_path / "absent.onnx"))
    with refuses("encoder-unfit: free first dimension"):
        Encoder.read(str(network(tmp_path / "a.onnx", batch=1)))
    with refuses("encoder-unfit: free first dimension"):
        Encoder.read(str(network(tmp_path / "b.onnx", shape=(1, "height", 8))))
    with refuses("encoder-unfit: 2 outputs"):
        Encoder.read(str(network(tmp_path / "c.onnx", outputs=2)))
    step = Encoder.read(str(network(tmp_path / "d.onnx")))
    with refuses("wrong-shape: 63 columns"):
        step(np.zeros((2, 63), np.float32))


def test_a_model_with_an_encoder_predicts_the_same_wherever_it_goes(path, tmp_path) -> None:
    import onnxruntime
    import torch

    import dpscaffold as dps
    from dpscaffold.algorithms import fedavg
    from dpscaffold.data.config import parse_data
    from dpscaffold.data.loading import load_federation
    from dpscaffold.models.export import export
    from dpscaffold.tasks.logistic import Logistic

    table = {"source": "digits", "users": 4, "preprocess": [f"encoder:{path}", "unit-norm"]}
    assert shape_of(parse_data(table)) is None
    federation = load_federation(table)
    assert any("frozen network" in sentence for sentence in federation.preprocessing)
    plan = dps.Plan(rounds=2, local_steps=2, user_ratio=0.5, learning_rate=0.5)
    privacy = dps.Gaussian(noise=2.0, clip=1.0)
    result = dps.train(federation, Logistic(5, 10), fedavg(), plan, privacy)
    rows = RNG.random((7, 64), dtype=np.float32)
    expected = result.model.scores(rows)
    dps.load_model(result.model.save(tmp_path / "model"))
    again = dps.load_model(tmp_path / "model")
    np.testing.assert_allclose(again.scores(rows), expected, atol=1e-6)
    module = again.to_module()
    np.testing.assert_allclose(module(torch.from_numpy(rows)).detach().numpy(), expected, atol=1e-5)
    with refuses("step-not-exported: --to onnx"):
        export(again, "torch", tmp_path / "model.pt2")
    assert not (tmp_path / "model.pt2").exists()
    pytest.importorskip("onnxscript")
    chained = export(again, "onnx", tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(chained.read_bytes())
    np.testing.assert_allclose(session.run(None, {"numbers": rows})[0], expected, atol=1e-5)
