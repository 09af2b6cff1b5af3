"""Where models run. base.py has the two protocols, select.py the choice, the others one backend each."""
