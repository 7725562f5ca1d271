from .budget import Budget as Budget
from .gaussian import Gaussian as Gaussian
from .run import Setting as Setting
from .secure import Secure as Secure
