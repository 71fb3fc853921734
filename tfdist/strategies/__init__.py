"""How do I run: the choice of a `tf.distribute` strategy, and its builders."""
