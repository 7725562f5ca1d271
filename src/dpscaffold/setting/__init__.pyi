from .budget import Budget as Budget
from .gaussian import Gaussian as Gaussian
from .plan import Plan as Plan
from .run import Setting as Setting
from .secure import Secure as Secure
