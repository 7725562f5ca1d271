from pathlib import Path

import torch
from flwr.serverapp import ServerApp

from dpscaffold import Gaussian, Plan
from dpscaffold.flower import Strategy
from own.model import SHAPE, make

app = ServerApp()


@app.main()
def main(grid, context):
    plan = Plan(rounds=3, local_steps=10, user_ratio=1.0, data_ratio=0.1, learning_rate=4.0)
    privacy = Gaussian(clip=1.0, noise=1.0, sampling="poisson")
    strategy = Strategy(make(), plan, privacy, SHAPE, clients=2)
    result = strategy.start(grid)
    out = Path(context.run_config["out"])
    torch.save(result.arrays.to_torch_state_dict(), out)
    out.with_suffix(".txt").write_text(str(strategy.guarantee))
