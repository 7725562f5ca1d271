from dpscaffold.flower import PrivateTraining, client_app
from own.model import SHAPE, load, make

app = client_app(PrivateTraining(make(), load, SHAPE, epsilon=2.0, delta=1e-5))
