"""The server inside a ServerApp: a deployed run over Flower's grid."""

from dpscaffold.deployment.transports.flower import require

require()

from flwr.app import Context  # noqa: E402
from flwr.serverapp import Grid, ServerApp  # noqa: E402

from dpscaffold.deployment.transports.flower.app import serve_app  # noqa: E402

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Offer the plan, train, write the run folder."""
    ended = serve_app(grid, context.run_config)
    if ended not in ("completed", "budget"):
        raise RuntimeError(f"the run ended {ended}; run it again to go on")
