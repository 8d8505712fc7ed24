//! Formulas and templates in the matrices: minijinja's expressions, over the settings of a side.

use std::sync::LazyLock;

use minijinja::Environment;
use serde_json::{Map, Value};

/// What a side does in a turn, by name: clients, door, depth ...
pub type Settings = Map<String, Value>;

static ENGINE: LazyLock<Environment<'static>> = LazyLock::new(Environment::new);

/// The value of an expression; null if it uses a setting that is not there.
///
/// # Panics
/// If it is no expression: a test reads all matrices.
pub fn evaluate(expression: &str, settings: &Settings) -> Value {
    let compiled = ENGINE.compile_expression(expression);
    let value = compiled.and_then(|formula| formula.eval(settings));
    let value = value.unwrap_or_else(|error| panic!("the formula '{expression}': {error:#}"));
    if value.is_undefined() {
        return Value::Null;
    }
    serde_json::to_value(value).expect("numbers, texts and lists")
}

/// The text of a template.
///
/// # Panics
/// As [`evaluate`].
pub fn fill(template: &str, settings: &Settings) -> String {
    let text = ENGINE.render_str(template, settings);
    text.unwrap_or_else(|error| panic!("the template '{template}': {error:#}"))
}

/// Replaces the texts that begin with `=` by the values of their expressions, which see the other
/// settings.
pub fn compute(settings: &mut Settings) {
    let is_formula = |(name, value): (&String, &Value)| {
        let formula = value.as_str()?.strip_prefix('=')?;
        Some((name.clone(), formula.to_owned()))
    };
    let formulas: Vec<_> = settings.iter().filter_map(is_formula).collect();
    for (name, formula) in formulas {
        let value = evaluate(&formula, settings);
        settings.insert(name, value);
    }
}
