"""Where the logits of a stage are computed: whole on the last one, or shared out over all."""
