"""`slipstream plan`: sizes of a run, memory of its learner, costs of a publish, advice on a run."""
