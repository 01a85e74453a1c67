"""Dask clusters that have workers for servers beside those for trainers.

=================== ===============================================
local               LocalCluster
interrupts          Ctrl-C interrupts the driver, not its workers
main_guard          refuses programs without `if __name__ == "__main__":`
server_workers      which workers have servers, and may not be ended
yarn                YarnCluster
yarn_specification  what YARN is asked to run; a pure function
yarn_application    an application on YARN: start it, ask for containers, end it
yarn_services       the programs that run in the containers
=================== ===============================================
"""
