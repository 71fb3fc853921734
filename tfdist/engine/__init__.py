"""Keras 3 made right under tf.distribute: the only room that touches Keras's private names."""
