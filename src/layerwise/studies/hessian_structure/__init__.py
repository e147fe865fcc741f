"""Networks whose layer Hessians are looked at: Wu (2023), chapter 4 and appendix C."""
