//! The corpus knows the protocol: an input has what a change of it can reach.

use std::path::Path;

use walvisor::control_socket::ControlCommand;
use walvisor_devices_fuzz::corpus;
use walvisor_fuzz::{Piece, pieces};

#[test]
fn every_command_with_each_of_its_arguments_is_in_the_corpus() {
    let inputs = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/control");
    let mut told = String::new();
    for input in corpus::inputs(&inputs) {
        for piece in pieces(&input, usize::MAX) {
            if let Piece::Text(text) = piece {
                told += &String::from_utf8_lossy(&text);
            }
        }
    }
    for name in ControlCommand::names() {
        let of_name = format!("\"execute\":\"{name}\"");
        let lines = || told.lines().filter(|line| line.contains(&of_name));
        assert!(lines().next().is_some(), "{name}");
        for argument in ControlCommand::arguments(name) {
            let named = format!("\"{argument}\":");
            assert!(
                lines().any(|line| line.contains(&named)),
                "{name} with {argument}"
            );
        }
    }
}
