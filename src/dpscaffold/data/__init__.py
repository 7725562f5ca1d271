"""Where federations come from: synthetic data, images, tables, arrays, and what was prepared
before."""

from dpscaffold.data.arrays import from_huggingface, from_pooled, from_users, read_npz
from dpscaffold.data.catalogue import data_folder
from dpscaffold.data.cifar import cifar10
from dpscaffold.data.coding import Table
from dpscaffold.data.config import DataSettings, parse_data
from dpscaffold.data.download import download
from dpscaffold.data.heterogeneity import Description, describe
from dpscaffold.data.images import digits, emnist, emnist47, fashion_mnist, mnist
from dpscaffold.data.leaf import read_leaf
from dpscaffold.data.loading import load_federation, prepare, preprocess_to
from dpscaffold.data.partition import dirichlet, iid, natural, shards, similarity
from dpscaffold.data.pool import Pool, assemble
from dpscaffold.data.preprocess import preprocess
from dpscaffold.data.storage import load, save
from dpscaffold.data.synthetic import synthetic
from dpscaffold.data.tables import read_table
from dpscaffold.data.writer import FederationWriter

__all__ = [
    "DataSettings",
    "Description",
    "FederationWriter",
    "Pool",
    "Table",
    "assemble",
    "cifar10",
    "data_folder",
    "describe",
    "digits",
    "dirichlet",
    "download",
    "emnist",
    "emnist47",
    "fashion_mnist",
    "from_huggingface",
    "from_pooled",
    "from_users",
    "iid",
    "load",
    "load_federation",
    "mnist",
    "natural",
    "parse_data",
    "prepare",
    "preprocess",
    "preprocess_to",
    "read_leaf",
    "read_npz",
    "read_table",
    "save",
    "shards",
    "similarity",
    "synthetic",
]
