"""Other people's libraries with and without `sparsebp.torch.accelerate`, on the same threads.

``python -m benchmarks others others-speech``. A step is what the library's users call: a rollout and its update of
sb3-contrib's RecurrentPPO, a ``fit`` of skorch or tsai, an epoch of flair. Each library runs an example of its own
documentation, on data drawn at random where the original is downloaded. Libraries that are not installed are left out,
with a note.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import itertools
import logging
import os
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import harness
from benchmarks.harness import Benchmark, Row, Run, columns, import_torch, refuse_difference
from sparsebp.core import timing
from sparsebp.core.errors import MissingDependencyError, OptionError

Settings = Mapping[str, Any]
Accelerate = Callable[[Any], Any]
"""`sparsebp.torch.accelerate`, or a function that returns the module as it is."""


class Case(NamedTuple):
    """A row of the table."""

    library: str
    cell: str
    hidden: int
    length: int  # of the sequences, in steps


class Side(NamedTuple):
    """A model of another library."""

    task: str  # of a step
    step: Callable[[], object]
    module: Callable[[], Any]  # its torch.nn.Module, which some libraries make in the first step


# Recommenders, classifiers, forecasters.


def recbole(case: Case, accelerate: Accelerate, settings: Settings) -> Side:
    """Return GRU4Rec on clicks of users, whose sessions RecBole pads to one length."""
    from recbole.config import Config
    from recbole.data import create_dataset, data_preparation
    from recbole.model.sequential_recommender import GRU4Rec
    from recbole.trainer import Trainer

    for name, kind in {"float_": np.float64, "complex_": np.complex128, "unicode_": np.str_}.items():
        setattr(np, name, kind)  # RecBole 1.2.1 reads names that NumPy 2 removed
    clicks = Path("clicks/clicks.inter")
    clicks.parent.mkdir(exist_ok=True)
    lines = (f"{n % 40}\t{item}\t{n}" for n, item in enumerate(integers(500, settings["samples"] * 4)))
    clicks.write_text("\n".join(("user_id:token\titem_id:token\ttimestamp:float", *lines)))
    options = {"data_path": "", "load_col": {"inter": ["user_id", "item_id", "timestamp"]}, "hidden_size": case.hidden,
               "MAX_ITEM_LIST_LENGTH": case.length, "train_neg_sample_args": None, "train_batch_size": 256, "epochs": 1,
               "device": "cpu", "use_gpu": False, "state": "ERROR"}  # fmt: skip
    config = Config("GRU4Rec", "clicks", config_dict=options)
    data, *_ = data_preparation(config, create_dataset(config))
    model = accelerate(GRU4Rec(config, data.dataset))
    return Side("an epoch of GRU4Rec", lambda: Trainer(config, model).fit(data, saved=False), lambda: model)


def lightning(case: Case, accelerate: Accelerate, settings: Settings) -> Side:
    """Return Lightning's example of truncated back-propagation through time."""
    import torch
    from lightning.pytorch import LightningModule, Trainer

    class Truncated(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.rnn = getattr(torch.nn, case.cell)(10, case.hidden, batch_first=True)
            self.out = torch.nn.Linear(case.hidden, 10)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

        def training_step(self, batch: Any, number: int) -> None:
            state, optimizer = None, self.optimizers()
            for x in batch[0].split(case.length, 1):
                y, state = self.rnn(x, state)
                optimizer.zero_grad()
                self.manual_backward(torch.nn.functional.mse_loss(self.out(y), x))
                optimizer.step()
                state = tuple(part.detach() for part in state) if case.cell == "LSTM" else state.detach()

    model = accelerate(Truncated())
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(
        torch.as_tensor(floats(settings["samples"], 4 * case.length, 10))), batch_size=16)  # fmt: skip
    return Side("truncated BPTT", lambda: Trainer(max_epochs=1, **LIGHTNING).fit(model, data), lambda: model)


def skorch(case: Case, accelerate: Accelerate, settings: Settings) -> Side:
    """Return skorch's classifier of texts: embedding, two recurrent layers, the last state."""
    import torch
    from skorch import NeuralNetClassifier

    class RNNClassifier(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = torch.nn.Embedding(1000, 128)
            self.rec = getattr(torch.nn, case.cell)(128, case.hidden, num_layers=2, batch_first=True)
            self.output = torch.nn.Linear(case.hidden, 2)

        def forward(self, words: Any) -> Any:
            _, last = self.rec(self.emb(words))
            return self.output((last[0] if case.cell == "LSTM" else last)[-1]).softmax(-1)

    net = NeuralNetClassifier(RNNClassifier, max_epochs=1, batch_size=128, optimizer=torch.optim.Adam, lr=1e-3,
                              train_split=None, verbose=0).initialize()  # fmt: skip
    accelerate(net.module_)
    x, y = integers(1000, settings["samples"], case.length), integers(2, settings["samples"])
    return Side("a partial_fit", lambda: net.partial_fit(x, y), lambda: net.module_)


def tsai(case: Case, accelerate: Accelerate, settings: Settings) -> Side:
    """Return tsai's classifier of time series, with one of its recurrent architectures."""
    from tsai.models import RNN
    from tsai.tslearner import TSClassifier

    x, y = floats(settings["samples"], 24, case.length), integers(6, settings["samples"])
    learner = TSClassifier(x, y, arch=getattr(RNN, case.cell), arch_config={"hidden_size": case.hidden}, bs=64,
                           splits=(list(range(len(x))), list(range(8))), seed=0)  # fmt: skip
    accelerate(learner.model)
    return Side("an epoch of TSClassifier", lambda: learner.fit_one_cycle(1), lambda: learner.model)


def pyhealth(case: Case, accelerate: Accelerate, settings: Settings) -> Side:
    """Return PyHealth's RNN on visits with codes, of different lengths, which it packs."""
    from pyhealth.datasets import SampleEHRDataset, get_dataloader
    from pyhealth.models import RNN
    from pyhealth.trainer import Trainer

    seed(0)  # the first import draws numbers
    rng = np.random.default_rng(0)
    samples = [
        {"patient_id": f"{n}", "visit_id": f"{n}", "label": int(rng.integers(2)),
         "conditions": [f"{code}" for code in rng.integers(100, size=rng.integers(1, case.length + 1))]}
        for n in range(settings["samples"])
    ]  # fmt: skip
    data = SampleEHRDataset(samples, dataset_name="visits")
    model = accelerate(RNN(data, ["conditions"], "label", "binary", hidden_dim=case.hidden, rnn_type=case.cell))
    trainer, batches = Trainer(model, device="cpu", enable_logging=False), get_dataloader(data, batch_size=32)
    return Side("an epoch of RNN", lambda: trainer.train(batches, epochs=1), lambda: model)


def darts(case: Case, accelerate: Accelerate, settings: Settings) -> Side:
    """Return darts' example: a year of monthly passengers and more per sample, in float64 as its series are."""
    from darts import TimeSeries
    from darts.models import RNNModel
    from pytorch_lightning.callbacks import LambdaCallback

    options = {**LIGHTNING, "callbacks": [LambdaCallback(on_fit_start=lambda trainer, module: accelerate(module))]}
    model = RNNModel(model=case.cell, hidden_dim=case.hidden, training_length=case.length, batch_size=16,
                     input_chunk_length=case.length * 2 // 3, random_state=0, pl_trainer_kwargs=options)  # fmt: skip
    series = TimeSeries.from_values(monthly(144))
    return Side("a fit", lambda: model.fit(series, epochs=settings["epochs"]), lambda: model.model)


def neuralforecast(case: Case, accelerate: Accelerate, settings: Settings) -> Side:
    """Return neuralforecast's example, on one monthly series."""
    import pandas
    from neuralforecast import NeuralForecast, models

    model = getattr(models, case.cell)(h=12, input_size=case.length, encoder_hidden_size=case.hidden,
                                       max_steps=settings["steps"], random_seed=1, **LIGHTNING)  # fmt: skip
    forecast = NeuralForecast(models=[accelerate(model)], freq="MS")
    dates = pandas.date_range("1949-01-01", periods=144, freq="MS")
    data = pandas.DataFrame({"unique_id": 1.0, "ds": dates, "y": monthly(144)})
    return Side("a fit", lambda: forecast.fit(df=data), lambda: forecast.models[0])


def keras(case: Case, accelerate: Accelerate, settings: Settings) -> Side:
    """Return a Keras model with a layer of torch.nn, as Keras' own recurrent layers are none of torch.nn's."""
    os.environ.setdefault("KERAS_BACKEND", "torch")
    import keras
    import torch

    if keras.backend.backend() != "torch":
        raise OptionError("Keras runs on another backend", expected="KERAS_BACKEND=torch", got=keras.backend.backend())

    class Last(keras.layers.Layer):
        def call(self, found: Any) -> Any:
            return found[0][:, -1]

    keras.utils.set_random_seed(0)
    layer = accelerate(getattr(torch.nn, case.cell)(38, case.hidden, batch_first=True))  # not in named_modules()
    model = keras.Sequential([keras.Input((case.length, 38)), keras.layers.TorchModuleWrapper(layer), Last(),
                              keras.layers.Dense(1)])  # fmt: skip
    model.compile("adam", "mse")
    x, y = floats(128, case.length, 38), floats(128, 1)
    return Side("an epoch", lambda: model.fit(x, y, batch_size=16, shuffle=False, verbose=0), lambda: layer)


# Text and speech.


def flair(case: Case, accelerate: Accelerate, settings: Settings) -> Side:
    """Return flair's tagger of words, an LSTM with a CRF over packed sentences."""
    from flair.data import Corpus, Sentence
    from flair.datasets import FlairDatapointDataset
    from flair.embeddings import OneHotEmbeddings
    from flair.models import SequenceTagger
    from flair.trainers import ModelTrainer

    rng, sentences = np.random.default_rng(0), []
    for words in (rng.integers(200, size=rng.integers(1, case.length + 1)) for _ in range(settings["samples"] // 4)):
        sentences.append(Sentence([f"w{word}" for word in words]))
        for token, word in zip(sentences[-1], words, strict=True):
            token.add_label("pos", f"tag{word % 12}")
    corpus = Corpus(FlairDatapointDataset(sentences), sample_missing_splits=False)
    tagger = SequenceTagger(OneHotEmbeddings.from_corpus(corpus, min_freq=1), corpus.make_label_dictionary("pos"),
                            "pos", hidden_size=case.hidden, rnn_type=case.cell)  # fmt: skip
    trainer = ModelTrainer(accelerate(tagger), corpus)
    options = {"max_epochs": 1, "learning_rate": 0.1, "save_final_model": False, "monitor_test": False}
    return Side("an epoch of SequenceTagger", lambda: trainer.train("flair", **options), lambda: tagger)


def stanza(case: Case, accelerate: Accelerate, settings: Settings) -> Side:
    """Return stanza's tokenizer with its options: two bidirectional LSTMs over packed characters."""
    import torch
    from stanza.models.tokenization.trainer import Trainer

    options = {"vocab_size": 100, "emb_dim": 32, "hidden_dim": case.hidden, "dropout": 0.33, "feat_dropout": 0.05,
               "feat_dim": 5, "rnn_layers": 1, "conv_res": None, "use_mwt": False, "hierarchical": True,
               "hier_invtemp": 0.5, "tok_noise": 0.02, "lr0": 2e-3, "weight_decay": 0.0, "max_grad_norm": 1.0,
               "lang": "en"}  # fmt: skip
    trainer = Trainer(options, device="cpu")
    accelerate(trainer.model)
    lengths = sorted(integers(case.length, 32) + 1, reverse=True)
    batch = [torch.as_tensor(array) for array in (
        integers(100, 32, lengths[0]), integers(3, 32, lengths[0]), floats(32, lengths[0], 5))]  # fmt: skip
    text = [["a"] * length for length in lengths]
    return Side("an update of the tokenizer", lambda: trainer.update((*batch, text)), lambda: trainer.model)


def speechbrain(case: Case, accelerate: Accelerate, settings: Settings) -> Side:
    """Return speechbrain's recogniser of phonemes: convolutions, a recurrent network, CTC."""
    import torch
    from speechbrain.core import Brain
    from speechbrain.lobes.models.CRDNN import CRDNN
    from speechbrain.nnet import RNN
    from speechbrain.nnet.losses import ctc_loss

    class CTC(Brain):
        def compute_forward(self, batch: Any, stage: Any) -> Any:
            return self.modules.model(batch[0]).log_softmax(-1)

        def compute_objectives(self, predictions: Any, batch: Any, stage: Any) -> Any:
            whole = torch.ones(len(batch[0]))
            return ctc_loss(predictions, batch[1], whole, whole, blank_index=0)

    model = CRDNN(input_shape=[None, None, 40], cnn_blocks=1, cnn_channels=(16,), cnn_kernelsize=(3, 3), rnn_layers=1,
                  rnn_class=getattr(RNN, case.cell), rnn_neurons=case.hidden, rnn_bidirectional=True, dnn_blocks=1,
                  dnn_neurons=128, time_pooling=True)  # fmt: skip
    brain = CTC({"model": accelerate(model)}, lambda parameters: torch.optim.SGD(parameters, lr=0.01))
    sounds, phonemes = floats(32, 2 * case.length, 40), 1 + integers(39, 32, case.length // 4)
    data = torch.utils.data.TensorDataset(torch.as_tensor(sounds), torch.as_tensor(phonemes))
    return Side("an epoch of CRDNN", lambda: brain.fit(range(1), data, train_loader_kwargs={"batch_size": 8}),
                lambda: brain.modules)  # fmt: skip


def torchaudio(case: Case, accelerate: Accelerate, settings: Settings) -> Side:
    """Return torchaudio's WaveRNN, a vocoder: one step per sample of sound."""
    import torch
    from torchaudio.models import WaveRNN

    model = accelerate(WaveRNN([5, 5, 8], n_classes=256, hop_length=200, n_rnn=case.hidden, n_fc=case.hidden))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    sound, melody = (torch.as_tensor(floats(2, 1, *shape)) for shape in ((case.length,), (128, case.length // 200 + 4)))
    target = torch.as_tensor(integers(256, 2, case.length))

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(sound, melody)[:, 0].mT, target).backward()
        optimizer.step()

    return Side("a step of WaveRNN", step, lambda: model)


# Agents: one step per call while they act.


def recurrent_ppo(case: Case, accelerate: Accelerate, settings: Settings) -> Side:
    """Return RecurrentPPO on CartPole; it runs its layer one step per call wherever an episode may begin."""
    from sb3_contrib import RecurrentPPO

    model = RecurrentPPO("MlpLstmPolicy", "CartPole-v1", n_steps=settings["rollout"], batch_size=settings["rollout"],
                         n_epochs=settings["updates"], policy_kwargs={"lstm_hidden_size": case.hidden}, seed=0,
                         device="cpu")  # fmt: skip
    accelerate(model.policy)
    return Side("RecurrentPPO: a rollout and its update",
                lambda: model.learn(settings["rollout"], reset_num_timesteps=False), lambda: model.policy)  # fmt: skip


def tianshou(case: Case, accelerate: Accelerate, settings: Settings) -> Side:
    """Return tianshou's recurrent DQN on CartPole: one step per call to act, few steps to learn."""
    import gymnasium
    from tianshou.algorithm import DQN
    from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
    from tianshou.algorithm.optim import AdamOptimizerFactory
    from tianshou.data import Collector, VectorReplayBuffer
    from tianshou.env import DummyVectorEnv
    from tianshou.trainer import OffPolicyTrainerParams
    from tianshou.utils.net.common import Recurrent

    environments = DummyVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 16)
    environments.seed(0)
    net = Recurrent(layer_num=2, state_shape=4, action_shape=2, hidden_layer_size=case.hidden)
    policy = DiscreteQLearningPolicy(model=accelerate(net), action_space=gymnasium.spaces.Discrete(2), eps_training=0.1)
    agent = DQN(policy=policy, optim=AdamOptimizerFactory(lr=1e-3), n_step_return_horizon=4, target_update_freq=320)
    memory = VectorReplayBuffer(20000, buffer_num=16, stack_num=case.length, ignore_obs_next=True)
    collector = Collector(agent, environments, memory, exploration_noise=True)
    collector.reset()
    collector.collect(n_step=16 * 16)
    options = OffPolicyTrainerParams(
        training_collector=collector, max_epochs=1, epoch_num_steps=4 * settings["steps"], batch_size=128,
        collection_step_num_env_steps=16, update_step_num_gradient_steps_per_sample=1 / 16, verbose=False,
        show_progress=False,
    )  # fmt: skip
    return Side("DRQN: an epoch", lambda: agent.run_training(options), lambda: net)


def torchrl(case: Case, accelerate: Accelerate, settings: Settings) -> Side:
    """Return TorchRL's tutorial of recurrent DQN, on CartPole's state: a rollout and updates over trajectories."""
    import torch
    from tensordict.nn import TensorDictModule, TensorDictSequential
    from torchrl import modules
    from torchrl.envs import GymEnv, InitTracker, TransformedEnv
    from torchrl.objectives import DQNLoss

    environment = TransformedEnv(GymEnv("CartPole-v1"), InitTracker())
    layer = getattr(modules, f"{case.cell}Module")(
        input_size=4, hidden_size=case.hidden, in_key="observation", out_key="embed"
    )
    environment.append_transform(layer.make_tensordict_primer())
    environment.set_seed(0)
    head = TensorDictModule(modules.MLP(in_features=case.hidden, out_features=2, num_cells=[64]),
                            in_keys=["embed"], out_keys=["action_value"])  # fmt: skip
    policy = accelerate(TensorDictSequential(layer, head, modules.QValueModule(spec=environment.action_spec)))
    loss = DQNLoss(policy, action_space=environment.action_spec, delay_value=True)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4)

    def step() -> None:
        with torch.no_grad():
            acted = environment.rollout(4 * case.length, policy, break_when_any_done=False).reshape(4, case.length)
        for _ in range(settings["updates"]):
            with modules.set_recurrent_mode(True):
                loss(acted)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()

    return Side("DRQN: a rollout and its updates", step, lambda: policy)


# Data.


def floats(*shape: int) -> np.ndarray:
    """Return normal random numbers in float32, the same at every call."""
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def integers(bound: int, *shape: int) -> np.ndarray:
    """Return random integers below `bound`, the same at every call."""
    return np.random.default_rng(0).integers(bound, size=shape)


def monthly(count: int) -> np.ndarray:
    """Return a series with a trend and a period of a year, in float64."""
    t = np.arange(count)
    return np.asarray(1 + t / count + 0.3 * np.sin(2 * np.pi * t / 12))


LIGHTNING = {"accelerator": "cpu", "enable_progress_bar": False, "logger": False, "enable_checkpointing": False,
             "enable_model_summary": False}  # fmt: skip
LIBRARIES: dict[str, Callable[[Case, Accelerate, Settings], Side]] = {
    "recbole": recbole, "lightning": lightning, "skorch": skorch, "tsai": tsai, "pyhealth": pyhealth, "darts": darts,
    "neuralforecast": neuralforecast, "keras": keras, "flair": flair, "stanza": stanza, "speechbrain": speechbrain,
    "torchaudio": torchaudio, "sb3_contrib": recurrent_ppo, "tianshou": tianshou, "torchrl": torchrl,
}  # fmt: skip
WHOLE_SEQUENCES = (
    Case("recbole", "GRU", 128, 50), Case("lightning", "LSTM", 20, 10), Case("lightning", "GRU", 20, 100),
    Case("skorch", "LSTM", 128, 50), Case("skorch", "GRU", 64, 50), Case("tsai", "LSTM", 100, 51),
    Case("tsai", "GRU", 100, 51), Case("pyhealth", "GRU", 128, 50), Case("darts", "LSTM", 20, 20),
    Case("neuralforecast", "GRU", 128, 24), Case("neuralforecast", "LSTM", 128, 24), Case("keras", "GRU", 20, 100),
)  # fmt: skip
SPEECH_AND_AGENTS = (
    Case("flair", "LSTM", 256, 30), Case("stanza", "LSTM", 64, 100), Case("speechbrain", "LSTM", 128, 100),
    Case("speechbrain", "GRU", 128, 100), Case("torchaudio", "GRU", 512, 1000), Case("sb3_contrib", "LSTM", 256, 1),
    Case("tianshou", "LSTM", 128, 4), Case("torchrl", "LSTM", 128, 50), Case("torchrl", "GRU", 128, 50),
)  # fmt: skip


def installed() -> set[str]:
    """Return the names of the libraries that are installed."""
    return {name for name in LIBRARIES if importlib.util.find_spec(name) is not None}


def measure_others(run: Run) -> Iterator[Row]:
    torch = import_torch()
    there = installed()
    if not there:
        raise MissingDependencyError("None of the libraries of this benchmark is installed",
                                     remedy="Install one or more: " + ", ".join(LIBRARIES))  # fmt: skip
    for name in dict.fromkeys(case.library for case in run.settings["cases"]):
        if name not in there:
            run.note(f"{name} is not installed: left out")
    for count in run.threads():
        for case in run.settings["cases"]:
            if case.library in there:
                detects = torch.autograd.set_detect_anomaly(False)  # which the import of RecBole sets for good
                with quietly(), detects, tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
                    try:
                        row = measure_others_row(run, case)
                    except Exception as error:  # of a library that does not work here; the others do
                        row = {**case._asdict(), "error": f"{type(error).__name__}: {error}"}
                yield row | {"threads": count}


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Hide what libraries print and log about every fit, and their warnings about each other."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), \
                contextlib.redirect_stderr(io.StringIO()):  # fmt: skip
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def seed(number: int) -> None:
    """Seed all random numbers that libraries draw."""
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - libraries draw from it
    import_torch().manual_seed(number)


def seeded(step: Callable[[], object]) -> Callable[[], None]:
    """Return a step that seeds itself by its number, so that both sides draw the same actions and episodes."""
    numbers = itertools.count()

    def run() -> None:
        seed(next(numbers))
        step()

    return run


def measure_others_row(run: Run, case: Case) -> Row:
    """Time both sides, after comparing all parameters behind a first step from the same seed."""
    import torch

    import sparsebp.torch as st
    from sparsebp.torch.dispatch import dispatch_of
    from sparsebp.torch.rule import way_of

    sides = {}
    for key, accelerate in {"ours": st.accelerate, "torch": lambda module: module}.items():
        seed(0)
        sides[key] = LIBRARIES[case.library](case, accelerate, run.settings)
    steps = {key: seeded(side.step) for key, side in sides.items()}
    weights = []
    for key, side in sides.items():
        steps[key]()
        weights.append(torch.cat([p.detach().double().ravel() for p in side.module().parameters()]))
    difference = float((weights[0] - weights[1]).norm() / weights[1].norm())
    refuse_difference(f"{case.library}, {case.cell}({case.hidden}): a parameter", "the plain model", difference)
    calls: list[bool] = []
    hooks = [module.register_forward_pre_hook(lambda module, args: calls.append(way_of(module, args[0]).ours))
             for module in sides["ours"].module().modules() if dispatch_of(module) is not None]  # fmt: skip
    steps["ours"]()
    for hook in hooks:
        hook.remove()
    steps["torch"]()
    timings = timing.measure(steps, **run.rounds)
    return {
        **case._asdict(), "package": f"{case.library} {version(case.library)}", "task": sides["ours"].task,
        "difference": difference, "share": sum(calls) / len(calls) if calls else 0.0,
    } | timing.side_by_side(timings)  # fmt: skip


def version(library: str) -> str:
    """Return the version of a library that is installed."""
    return importlib.metadata.version(importlib.metadata.packages_distributions()[library][0])


def benchmark(name: str, kind: str, cases: tuple[Case, ...]) -> Benchmark:
    """Return the benchmark of a part of the libraries."""
    return Benchmark(
        name=name,
        title=f"{kind} of other libraries on the CPU with and without accelerate",
        leaves_out="nothing; the library's own loop, environment and data loading count on both sides",
        sizes={"cases": cases, "rollout": 256, "updates": 2, "epochs": 20, "steps": 50, "samples": 256},
        quick={
            "cases": tuple(case._replace(hidden=8, length=max(1, case.length // 5)) for case in cases), "rollout": 16,
            "updates": 1, "epochs": 1, "steps": 1, "samples": 64,
        },
        rounds={"rounds": 7, "least_rounds": 3, "budget": 10.0, "warmup": 1},
        quick_rounds={"rounds": 1, "least_rounds": 1, "warmup": 1},
        threads=(1,),
        measure=measure_others,
        columns=columns(
            words={"package": "library", "task": "a step is"},
            numbers={"hidden": "H"},
            seconds={"ours": "accelerated", "torch": "as it is"},
            times={"torch_ratio": "over the library as it is"},
            formats={"{:.0%}": {"share": "calls by the kernels"}, "{:.1e}": {"difference": "difference"}},
        ),
        short=("package", "task", "cell", "hidden", "length", "share", "ours", "torch_ratio"),
        in_readme=lambda row: (row["library"], row["cell"]) in IN_README,
        picture=harness.bars("{library}: {cell}({hidden}), T = {length}", {"torch_ratio": "over the library as it is"},
                             harness.SPEED_UP, (harness.TORCH,), line=1.0),
    )  # fmt: skip


IN_README = {(library, "GRU") for library in ("recbole", "lightning", "skorch", "neuralforecast")} | {("darts", "LSTM")}

OTHERS = benchmark("others", "Recommenders, classifiers and forecasters", WHOLE_SEQUENCES)
OTHERS_SPEECH = benchmark("others-speech", "Text, speech and agents", SPEECH_AND_AGENTS)
