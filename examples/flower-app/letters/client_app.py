"""A site inside a ClientApp: one message in, the site's answer out."""

from dpscaffold.deployment.transports.flower import require

require()

from flwr.app import Context, Message  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402

from dpscaffold.deployment.transports.flower.app import answer_message, site_path  # noqa: E402

app = ClientApp()


@app.query()
def query(message: Message, context: Context) -> Message:
    """Answer a letter with the installed package and the state on this site's disk."""
    return answer_message(message, site_path(context.node_config, context.run_config))
