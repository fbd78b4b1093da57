"""Memory, step time, tracing time and gradient error of `jaxmp.autocast` against casts by hand."""
