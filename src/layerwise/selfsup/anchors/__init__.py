"""Anchor vectors of an output embedding: does ⟨h, v_0⟩ predict the log partition function of the less likely words?"""
