from .front import run as run
from .front import train as train
from .in_progress import OwnMetric as OwnMetric
from .result import Result as Result
from .result import judged as judged
from .result import summarise as summarise
