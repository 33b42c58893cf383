"""SpecTrain: predict the weights of a few updates ahead

In an asynchronous pipeline a forward reads weights that are several updates old when its gradient arrives. SpecTrain
predicts them from the smoothed gradient of SGD with momentum; the prediction is closer than the old weights.

More: [Weight prediction](../explanation/weight-prediction.md)
"""

import matplotlib.pyplot as plt
import numpy as np

import sparsebp as sb

AHEAD = 4  # updates
rng = np.random.default_rng(0)
x = rng.standard_normal((512, 20)).astype(np.float32)
target = (x[:, :3] ** 2).argmax(axis=1)

model = sb.nn.Sequential(sb.nn.Linear(20, 32, rng=0), sb.nn.Tanh(), sb.nn.Linear(32, 3, rng=1))
weights = model.parameters()
sgd = sb.optim.SGD(weights, lr=0.02, momentum=0.9)
predictor = sb.optim.make_predictor("momentum", sgd)
value_and_grad = sb.value_and_grad(model, sb.nn.CrossEntropyLoss())

old, predicted = [], []
for _ in range(120):
    batch = rng.integers(0, 512, 64)
    _, grads = value_and_grad(x[batch], target[batch])
    sgd.step(grads)
    predictor.observe(grads, grads)
    old.append(weights["0.weight"].copy())
    predicted.append(predictor.predict(["0.weight"], s=AHEAD)["0.weight"])

stale = [np.linalg.norm(old[t] - old[t + AHEAD]) for t in range(len(old) - AHEAD)]
error = [np.linalg.norm(predicted[t] - old[t + AHEAD]) for t in range(len(old) - AHEAD)]
plt.plot(stale, label="weights as they are")
plt.plot(error, label="predicted weights")
plt.xlabel("update")
plt.ylabel(f"distance to the weights\n{AHEAD} updates later")
plt.legend()

plt.show()
