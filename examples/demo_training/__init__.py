# SPDX-License-Identifier: Apache-2.0
"""Parts of ``train_demo_model.py``: the text, the model, the outliers, and a simulation of FP8 in plain torch."""
