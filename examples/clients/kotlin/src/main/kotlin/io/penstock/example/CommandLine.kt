package io.penstock.example

import io.penstock.common.v1.SamplingParams
import io.penstock.inference.v1.ChatRequest
import io.penstock.inference.v1.GenerateRequest
import io.penstock.inference.v1.chatMessage
import io.penstock.inference.v1.chatRequest
import io.penstock.inference.v1.generateRequest
import java.math.BigDecimal
import kotlin.time.Duration
import kotlin.time.Duration.Companion.seconds

internal val USAGE =
    """
    usage: client generate [options] PROMPT
           client chat     [options] MESSAGE
           client session  [options] PROMPT...
           client load     [options] PROMPT
      --address HOST:PORT   server (localhost:50051); dns:///NAME:PORT uses all addresses in turn
      --tls                 encrypt the connection
      --ca FILE             file with the certificates to trust; implies --tls
      --timeout SECONDS     deadline of each call
      --model NAME          name of the model; default: the served model
      --max-tokens N        maximum number of output tokens
      --temperature T       sampling temperature; 0: greedy
      --seed N              seed for sampling, which makes the output reproducible
      --stop TEXT           text that ends the output; the option can be repeated
    chat:
      --system TEXT         system message of the conversation
    session:
      --abort-after N       abort the first request after N of its messages
    load:
      --at-once N           number of calls that run at the same time (1)
      --calls N             total number of calls (default: the value of --at-once)
      --for SECONDS         start new calls for this time, instead of --calls
    environment:
      PENSTOCK_API_KEY      API key that the client sends
    """.trimIndent()

private val COMMANDS = setOf("generate", "chat", "session", "load")
private val UINT32 = 0L..UInt.MAX_VALUE.toLong()
private val COUNT = 1L..Int.MAX_VALUE

/** Error in the command line. */
internal class UsageException(message: String) : Exception(message)

/** Values of the command line. A value is null if the command line does not have it. */
internal class CommandLine(args: List<String>) {
    private val rest = args.iterator()
    val command: String = if (rest.hasNext()) rest.next() else throw UsageException("a command is needed")
    val prompts = mutableListOf<String>()
    var address = "localhost:50051"
        private set
    var tls = false
        private set
    var ca: String? = null
        private set
    var timeout: Duration? = null
        private set
    var abortAfter: Int? = null
        private set
    var atOnce = 1
        private set
    var calls: Long? = null
        private set
    var loadFor: Duration? = null
        private set
    private var system: String? = null
    private var modelName = ""

    /** Has only the parameters that the command line sets. For all others, the model's default applies. */
    private val params = SamplingParams.newBuilder()

    init {
        if (command !in COMMANDS) throw UsageException("$command is no command")
        while (rest.hasNext()) {
            val word = rest.next()
            when {
                word == "--" -> rest.forEachRemaining(prompts::add)
                word.startsWith("-") -> readFlag(word)
                else -> prompts += word
            }
        }
        check()
    }

    fun generate(prompt: String): GenerateRequest = generateRequest {
        model = modelName
        text = prompt
        samplingParams = params.build()
    }

    fun chat(message: String): ChatRequest = chatRequest {
        model = modelName
        samplingParams = params.build()
        system?.let { instructions ->
            messages += chatMessage {
                role = "system"
                content = instructions
            }
        }
        messages += chatMessage {
            role = "user"
            content = message
        }
    }

    private fun readFlag(flag: String) {
        when (flag) {
            "--address" -> address = value(flag)
            "--tls" -> tls = true
            "--ca" -> ca = value(flag)
            "--timeout" -> timeout = seconds(flag)
            "--model" -> modelName = value(flag)
            "--max-tokens" -> params.maxTokens = integer(flag, UINT32).toInt()
            "--temperature" -> params.temperature = number(flag).toFloat()
            "--seed" -> params.seed = integer(flag, Long.MIN_VALUE..Long.MAX_VALUE)
            "--stop" -> params.addStop(value(flag))
            else -> readFlagOfCommand(flag)
        }
    }

    private fun readFlagOfCommand(flag: String) {
        when ("$command $flag") {
            "chat --system" -> system = value(flag)
            "session --abort-after" -> abortAfter = integer(flag, COUNT).toInt()
            "load --at-once" -> atOnce = integer(flag, COUNT).toInt()
            "load --calls" -> calls = integer(flag, COUNT)
            "load --for" -> loadFor = seconds(flag)
            else -> throw UsageException("$command has no option $flag")
        }
    }

    private fun check() {
        if (prompts.isEmpty()) {
            throw UsageException("$command needs a ${if (command == "chat") "MESSAGE" else "PROMPT"}")
        }
        if (prompts.size > 1 && command != "session") {
            throw UsageException("$command takes one argument, not ${prompts.size}")
        }
        if (calls != null && loadFor != null) throw UsageException("--calls and --for exclude each other")
    }

    private fun value(flag: String): String = if (rest.hasNext()) rest.next() else throw UsageException("$flag needs a value")

    private fun number(flag: String): BigDecimal {
        val value = value(flag)
        return value.toBigDecimalOrNull() ?: throw UsageException("$flag: $value is not a number")
    }

    private fun seconds(flag: String): Duration {
        val number = number(flag)
        if (number.signum() <= 0) throw UsageException("$flag: $number is not a number of seconds above 0")
        return number.toDouble().seconds
    }

    private fun integer(flag: String, range: LongRange): Long {
        val value = value(flag)
        return value.toLongOrNull()?.takeIf { it in range }
            ?: throw UsageException("$flag: $value is not a whole number from ${range.first} to ${range.last}")
    }
}
