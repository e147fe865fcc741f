"""The step of an optimizer at its best: one batch, at a rate at which it is hardly learnt, so that factors stand still.
Beside it the limits of this model and device in plain torch."""
