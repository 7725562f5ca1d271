from .client import PrivateTraining as PrivateTraining
from .client import client_app as client_app
from .strategy import ClientGuarantee as ClientGuarantee
from .strategy import Strategy as Strategy
