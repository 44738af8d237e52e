"""Tables, plots and the HTML page. Reports read only run directories: any run, old or new, simulated or real."""
