//! Checks the answers to a client's lines, and what the answers say about the disks.

use serde_json::Value;
use walvisor::control_socket::MAX_LINE;

use crate::client::Answers;
use crate::guest::{DISKS, Sizes};
use crate::words::Piece;

/// The state of the process, as the answers so far have reported it.
pub struct Judge {
    sizes: Sizes,
    paused: bool,
    /// A `shutdown` that takes effect was answered.
    ended: bool,
    /// The process is a VM, which can end at once without its guest's consent; a daemon has no
    /// guest.
    vm: bool,
}

impl Judge {
    /// The state before the first request.
    pub fn new(sizes: Sizes, vm: bool) -> Self {
        Self {
            sizes,
            paused: false,
            ended: false,
            vm,
        }
    }

    /// The current size of each disk in bytes.
    pub fn sizes(&self) -> Sizes {
        self.sizes
    }

    /// Compares the answers to a conversation with its lines.
    pub fn check(&mut self, pieces: &[Piece], answers: Answers) {
        let mut answers = answers.0.into_iter();
        let mut line = Vec::new();
        for piece in pieces {
            let Piece::Text(text) = piece else { continue };
            for &byte in text {
                if byte == b'\n' {
                    self.check_line(&line, true, &mut answers);
                    line.clear();
                } else if line.len() <= MAX_LINE {
                    // A line that is already too long needs no further bytes.
                    line.push(byte);
                }
            }
        }
        self.check_line(&line, false, &mut answers);
        assert!(answers.next().is_none(), "an answer that nobody asked for");
    }

    fn check_line(
        &mut self,
        line: &[u8],
        ended: bool,
        answers: &mut impl Iterator<Item = Vec<u8>>,
    ) {
        let long = line.len() > MAX_LINE;
        // The server ignores blank lines.
        if line.trim_ascii().is_empty() && !long {
            return;
        }
        let answer = answers.next().expect("a line was not answered");
        assert_eq!(answer.last(), Some(&b'\n'), "an answer without an end");
        let answer: Value = serde_json::from_slice(&answer).expect("an answer is JSON");
        let request = if ended && !long {
            serde_json::from_slice(line).unwrap_or(Value::Null)
        } else {
            Value::Null
        };
        self.check_answer(&request, &answer);
    }

    fn check_answer(&mut self, request: &Value, answer: &Value) {
        let (done, error) = (answer.get("return"), answer.get("error"));
        assert!(done.is_some() != error.is_some(), "{answer}");
        if let Some(error) = error {
            let text = error["desc"].as_str().expect("an error says what");
            assert!(!text.is_empty() && !text.contains('\n'), "{answer}");
            let class = error["class"].as_str().expect("an error has a class");
            const CLASSES: [&str; 3] = ["GenericError", "CommandNotFound", "DeviceNotFound"];
            assert!(CLASSES.contains(&class), "{answer}");
            // A refused line has its own id if the server could read it, and none otherwise.
            assert!(
                answer["id"].is_null() || answer["id"] == request["id"],
                "{answer}"
            );
            return;
        }
        let done = done.expect("seen above");
        assert_eq!(answer["id"], request["id"], "{answer}");
        let command = request["execute"].as_str().expect("what is done was asked");
        match command {
            "stats" => self.check_stats(done),
            "pause" => {
                assert_eq!(done["state"], "paused");
                // A pause of one disk is none of the process.
                self.paused |= done["disk"].is_null();
            }
            "resume" => {
                assert_eq!(done["state"], "running");
                self.paused = false;
            }
            "resize" => {
                let (disk, size) = (disk(done), request["arguments"]["size_bytes"].as_u64());
                assert_eq!(done["old_size_bytes"], self.sizes[disk], "{answer}");
                assert_eq!(done["size_bytes"].as_u64(), size, "{answer}");
                assert!(size >= Some(self.sizes[disk]), "a disk got shorter");
                self.sizes[disk] = size.expect("compared above");
            }
            "cache" => {
                let wanted = &request["arguments"]["cache"];
                assert_eq!(done["requested"], *wanted, "{answer}");
                // Writethrough takes effect at once.
                assert!(
                    wanted == "writeback" || done["cache"] == *wanted,
                    "{answer}"
                );
            }
            "limits" => {
                for limit in ["ops", "bytes"].map(|of| format!("{of}_per_second")) {
                    let wanted = &request["arguments"][&limit];
                    assert!(wanted.is_null() || done[&limit] == *wanted, "{answer}");
                }
            }
            "checkpoint" => assert!(done["disks"].is_array(), "{answer}"),
            // Nobody has sent a descriptor, so there are none.
            list @ ("looks" | "exports") => {
                assert_eq!(done[list].as_array().map(Vec::len), Some(0), "{answer}");
            }
            "shutdown" => {
                let now = request["arguments"]["now"] == true;
                // A VM asks its guest to power off; a daemon ends.
                self.ended |= now || !self.vm;
                self.paused &= now;
            }
            other => panic!("'{other}' was done"),
        }
    }

    fn check_stats(&self, stats: &Value) {
        if let Some(text) = stats["text"].as_str() {
            assert!(text.contains("# TYPE"), "no Prometheus text: {text}");
            return;
        }
        let state = if self.paused { "paused" } else { "running" };
        assert_eq!(stats["state"], state);
        let disks = stats["disks"].as_array().expect("disks");
        assert_eq!(disks.len(), DISKS.len());
        for ((disk, size), name) in disks.iter().zip(self.sizes).zip(DISKS) {
            assert_eq!(disk["name"], name);
            assert_eq!(disk["size_bytes"], size, "{name}");
        }
    }

    /// Checks that the process was asked to end exactly if an answer said so.
    pub fn check_end(&self, ended: bool) {
        assert_eq!(ended, self.ended, "the end");
    }
}

fn disk(done: &Value) -> usize {
    let known = DISKS.iter().position(|name| done["disk"] == *name);
    known.expect("a disk that there is")
}
