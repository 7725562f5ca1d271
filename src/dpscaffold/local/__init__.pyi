from .gaussian import Gaussian as Gaussian
