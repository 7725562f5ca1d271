__version__: str

from .algorithms import Algorithm as Algorithm
from .algorithms import fedavg as fedavg
from .algorithms import fedprox as fedprox
from .algorithms import ridge as ridge
from .algorithms import scaffold as scaffold
from .algorithms import scaffold_balanced as scaffold_balanced
from .algorithms import scaffold_warm as scaffold_warm
from .config.gaussian import Gaussian as Gaussian
from .config.plan import Plan as Plan
from .data.sources.objects import federation_of as federation_of
from .data.synthesis import synthetic as synthetic
from .errors import BadInput as BadInput
from .federation import Federation as Federation
from .models.loading import load_model as load_model
from .models.model import Model as Model
from .planning.recommendation import plan as plan
from .runs.stating import state as state
from .tasks import Linear as Linear
from .tasks import Logistic as Logistic
from .tasks import Mlp as Mlp
from .tasks import ModuleTask as ModuleTask
from .tasks import Task as Task
from .training.result import Result as Result
from .training.train import run as run
from .training.train import train as train
