//! A matrix: rows, the sides that take turns in each, and what the turns measured.
//!
//! ```text
//!   Matrix ─▶ Row: clients 8 ─▶ Side: group commit off ─▶ its settings, its turns
//!                            └▶ Side: group commit on  ─▶ its settings, its turns
//! ```

use std::time::Duration;

use serde::de::DeserializeOwned;
use serde_json::Value;
use walvisor::commands::CommandError;

use super::formula::{Settings, compute, evaluate, fill};
use super::spec::SectionSpec;
use crate::report::Spread;
use crate::session::Session;

/// The figures of one turn: a JSON object whose keys have their unit.
#[derive(Clone, Debug, Default)]
pub struct Turn(pub Value);

impl Turn {
    /// The figure with this key. `None` if it was not measured.
    pub fn get(&self, key: &str) -> Option<f64> {
        self.0.get(key)?.as_f64()
    }

    /// The list with this key.
    pub fn list(&self, key: &str) -> Vec<f64> {
        let values = self.0[key].as_array().into_iter().flatten();
        values.filter_map(Value::as_f64).collect()
    }
}

/// A side of a row, with its turns.
#[derive(Clone, Debug)]
pub struct Side {
    /// Its name in the matrix, the same in all rows.
    pub side: String,
    /// Its name in tables.
    pub name: String,
    /// What it does in a turn.
    pub plan: Settings,
    /// Its turns so far.
    pub turns: Vec<Turn>,
    /// Whether its times mean nothing, because it runs on an emulated machine.
    pub emulated: bool,
}

impl Side {
    /// Its settings as a type of the benchmark.
    ///
    /// # Panics
    /// If the matrix lacks one.
    pub fn plan<P: DeserializeOwned>(&self) -> P {
        let plan = serde_json::from_value(Value::Object(self.plan.clone()));
        plan.unwrap_or_else(|error| panic!("the side {}: {error}", self.name))
    }

    /// A setting that is a text; empty if there is none.
    pub fn text(&self, setting: &str) -> &str {
        let value = self.plan.get(setting).and_then(Value::as_str);
        value.unwrap_or_default()
    }

    /// A setting that is a whole number; 0 if there is none.
    pub fn number(&self, setting: &str) -> u64 {
        let value = self.plan.get(setting).and_then(Value::as_u64);
        value.unwrap_or_default()
    }

    /// A figure of those turns that have it.
    pub fn of(&self, key: &str) -> Vec<f64> {
        self.turns.iter().filter_map(|turn| turn.get(key)).collect()
    }

    /// The spread of a figure.
    pub fn spread(&self, key: &str) -> Option<Spread> {
        Spread::of(&self.of(key))
    }

    /// The median of a figure.
    pub fn median(&self, key: &str) -> Option<f64> {
        self.spread(key).map(|spread| spread.median)
    }
}

/// The sides that do the same job.
#[derive(Clone, Debug)]
pub struct Row {
    /// Its name.
    pub name: String,
    /// The sides, in the order of the table.
    pub sides: Vec<Side>,
}

impl Row {
    /// The side with this name in the matrix.
    pub fn side(&self, name: &str) -> Option<&Side> {
        self.sides.iter().find(|side| side.side == name)
    }

    /// Whether any turn was measured.
    pub fn is_measured(&self) -> bool {
        self.sides.iter().any(|side| !side.turns.is_empty())
    }
}

/// What takes the turns of a benchmark.
pub trait TakeTurns {
    /// Gets ready for the turns of a row.
    ///
    /// # Errors
    /// If that fails.
    fn prepare(&mut self, _row: &Row) -> Result<(), CommandError> {
        Ok(())
    }

    /// Takes a turn.
    ///
    /// # Errors
    /// If it fails.
    fn turn(&mut self, side: &Side) -> Result<Turn, CommandError>;
}

impl<F: FnMut(&Side) -> Result<Turn, CommandError>> TakeTurns for F {
    fn turn(&mut self, side: &Side) -> Result<Turn, CommandError> {
        self(side)
    }
}

/// The rows of a section.
#[derive(Debug)]
pub struct Matrix {
    /// How it is measured and shown.
    pub spec: SectionSpec,
    /// The rows, in the order of the table.
    pub rows: Vec<Row>,
    /// More paragraphs between title and table, such as why a side is missing.
    pub notes: Vec<String>,
}

impl Matrix {
    /// The matrices of a section: one, or one for each combination of `split`.
    pub fn of(spec: &SectionSpec) -> Vec<Self> {
        let combinations = combine(&spec.split).into_iter();
        let matrix = |split: Settings| {
            let mut settings = spec.plan.clone();
            settings.extend(split);
            let rows = if spec.rows.is_empty() {
                &[Settings::new()][..]
            } else {
                &spec.rows
            };
            let axes = combine(&spec.axes);
            let rows = rows.iter().flat_map(|row| {
                axes.iter()
                    .map(|axis| row_of(spec, &[&settings, row, axis]))
            });
            let rows = rows.filter(|row| !row.sides.is_empty()).collect();
            Self {
                spec: spec.clone(),
                rows,
                notes: Vec::new(),
            }
        };
        combinations.map(matrix).collect()
    }

    /// All sides of all rows.
    pub fn sides(&self) -> impl Iterator<Item = &Side> {
        self.rows.iter().flat_map(|row| &row.sides)
    }

    /// All sides of all rows.
    pub fn sides_mut(&mut self) -> impl Iterator<Item = &mut Side> {
        self.rows.iter_mut().flat_map(|row| &mut row.sides)
    }

    /// Leaves only these sides, if any are named.
    pub fn keep_sides(&mut self, names: &[String]) {
        for row in self.rows.iter_mut().filter(|_| !names.is_empty()) {
            row.sides.retain(|side| names.contains(&side.side));
        }
        self.rows.retain(|row| !row.sides.is_empty());
    }

    /// Estimated time of all rounds.
    pub fn expected(&self) -> Duration {
        let once: Duration = self.sides().map(|side| self.takes(side)).sum();
        once * self.rounds() as u32
    }

    /// Estimated time of a turn.
    fn takes(&self, side: &Side) -> Duration {
        let seconds = evaluate(&self.spec.takes, &side.plan).as_f64();
        Duration::from_secs_f64(seconds.unwrap_or_default())
    }

    /// Gives each side of each row a turn in every round, so that all see the machine in the same
    /// states, unless the session has to end.
    ///
    /// # Errors
    /// The errors of `turn`.
    pub fn measure(
        &mut self,
        session: &Session,
        turn: impl FnMut(&Side) -> Result<Turn, CommandError>,
    ) -> Result<(), CommandError> {
        measure_together(std::slice::from_mut(self), session, turn)
    }

    /// Measures row after row, each with all its rounds, unless the session has to end.
    ///
    /// # Errors
    /// The errors of the turns.
    pub fn measure_rows(
        &mut self,
        session: &Session,
        player: &mut impl TakeTurns,
    ) -> Result<(), CommandError> {
        for row in 0..self.rows.len() {
            if session.interrupted() {
                return Ok(());
            }
            player.prepare(&self.rows[row])?;
            for round in 0..self.rounds() {
                let turn = |side: &Side| player.turn(side);
                if !self.measure_row(row, round, session, turn)? {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// The number of rounds, with the one that does not count.
    pub fn rounds(&self) -> usize {
        self.spec.rounds + usize::from(self.spec.warm_up)
    }

    /// Gives each side of a row a turn. The first is another one in each round, so that no side is
    /// always first. A setting `rounds` is the most that a side has. Returns `false` if the session
    /// has to end.
    ///
    /// # Errors
    /// The errors of `turn`.
    pub fn measure_row(
        &mut self,
        row: usize,
        round: usize,
        session: &Session,
        mut turn: impl FnMut(&Side) -> Result<Turn, CommandError>,
    ) -> Result<bool, CommandError> {
        let (rounds, sides) = (self.rounds(), self.rows[row].sides.len());
        for at in 0..sides {
            let at = (round + at) % sides;
            let (row_name, side) = (&self.rows[row].name, &self.rows[row].sides[at]);
            let most = side.plan.get("rounds").and_then(Value::as_u64);
            if most.is_some_and(|most| round as u64 >= most) {
                continue;
            }
            let what = format!("{row_name}: {}, round {} of {rounds}", side.name, round + 1);
            match session.step(&what, self.takes(side), || turn(side))? {
                Some(_) if round == 0 && self.spec.warm_up => {}
                Some(turn) => self.rows[row].sides[at].turns.push(turn),
                None => return Ok(false),
            }
        }
        Ok(true)
    }
}

/// Gives each side of each row of all matrices a turn in every round, unless the session has to
/// end.
///
/// # Errors
/// The errors of `turn`.
pub fn measure_together(
    matrices: &mut [Matrix],
    session: &Session,
    mut turn: impl FnMut(&Side) -> Result<Turn, CommandError>,
) -> Result<(), CommandError> {
    let rounds = matrices.iter().map(Matrix::rounds).max().unwrap_or(0);
    for round in 0..rounds {
        for matrix in matrices.iter_mut().filter(|matrix| round < matrix.rounds()) {
            for row in 0..matrix.rows.len() {
                if !matrix.measure_row(row, round, session, &mut turn)? {
                    return Ok(());
                }
            }
        }
    }
    Ok(())
}

/// All combinations of the axes.
fn combine(axes: &[Settings]) -> Vec<Settings> {
    let mut all = vec![Settings::new()];
    for axis in axes {
        let places = axis.values().filter_map(Value::as_array).map(Vec::len);
        let places = places.min().unwrap_or(0);
        let at = |place: usize| {
            let values = axis.iter();
            values.map(move |(name, values)| (name.clone(), values[place].clone()))
        };
        all = all
            .iter()
            .flat_map(|known| (0..places).map(move |place| (known, place)))
            .map(|(known, place)| known.clone().into_iter().chain(at(place)).collect())
            .collect();
    }
    all
}

/// A row with its sides, whose settings are those of the `parts`, and their own.
fn row_of(spec: &SectionSpec, parts: &[&Settings]) -> Row {
    let merged = |own: &Settings| {
        let parts = parts.iter().copied().chain([own]);
        let mut plan: Settings = parts
            .flatten()
            .map(|(k, v)| (k.clone(), v.clone()))
            .collect();
        compute(&mut plan);
        plan
    };
    let settings = merged(&Settings::new());
    let sides = spec.sides.iter().filter_map(|side| {
        let plan = merged(&side.settings);
        let is_there = |only: &String| evaluate(only, &plan).as_bool() == Some(true);
        if !side.only.as_ref().is_none_or(is_there) {
            return None;
        }
        let name = side.name.as_deref().unwrap_or(&side.side);
        Some(Side {
            side: side.side.clone(),
            name: fill(name, &plan),
            plan,
            turns: Vec::new(),
            emulated: false,
        })
    });
    Row {
        name: fill(&spec.row, &settings),
        sides: sides.collect(),
    }
}
