"""`edgec validate`: an engine of a bundle, held against an independent reference.

options        what is compared, on how much text, within which limits (the recipe's `validate:`)
findings       what a check gives
subjects       the two protocols: an engine of the bundle, and a reference
requests       asks an engine for answers
scores         log-probabilities of a text, whole or of the likeliest tokens
tails          the tails of the chi-square and Poisson distributions
native_subject, graph_subject          engines of a bundle
reference_subject, server              references: in this process, or an OpenAI-compatible server
check_weights, check_text, check_greedy, check_sampling, check_paths      the checks
diagnosis, hypotheses                  which way a failure points
validate       all of it, for every engine of a bundle
stage          the same as a stage of `edgec build`
"""
