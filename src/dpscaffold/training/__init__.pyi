from .front import run as run
from .front import train as train
from .in_progress import OwnMetric as OwnMetric
from .result import Result as Result
from .result import baseline_verdict as baseline_verdict
from .result import summarise as summarise
