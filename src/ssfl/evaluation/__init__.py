"""How good an encoder is: with labels (kNN, linear, fine-tuning) and without any (health).

Pure functions over tensors and modules. Labels are read here and only here; training never sees
them. Import from the modules: `features`, `knn`, `linear`, `finetune`, `health`, `in_words`,
`summary`.
"""
