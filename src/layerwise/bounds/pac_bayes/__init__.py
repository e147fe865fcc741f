"""PAC-Bayes bounds of a trained network, with a Gaussian posterior that is diagonal in a basis of each layer's own.

Wu (2023), section 4.6 and appendix C.8, after Dziugaite and Roy (2017), corrected: the prior's grid begins at j = 1.
"""
