__version__: str

from .accounts import Budget as Budget
from .algorithms import ALGORITHMS as ALGORITHMS
from .algorithms import Algorithm as Algorithm
from .algorithms import fedavg as fedavg
from .algorithms import fedprox as fedprox
from .algorithms import fedsgd as fedsgd
from .algorithms import scaffold as scaffold
from .algorithms import scaffold_warm as scaffold_warm
from .data.synthesis import synthetic as synthetic
from .errors import BadInput as BadInput
from .errors import Diverged as Diverged
from .federation import Federation as Federation
from .federation import Records as Records
from .local import Gaussian as Gaussian
from .model import Model as Model
from .plan import Plan as Plan
from .schema import Target as Target
from .tasks import Logistic as Logistic
from .tasks import Mlp as Mlp
from .tasks import ModuleTask as ModuleTask
from .tasks import Task as Task
from .training import Result as Result
from .training import train as train
