from .evaluate import evaluate_files as evaluate_files
from .loading import load_model as load_model
from .model import Model as Model
from .predict import predict_files as predict_files
